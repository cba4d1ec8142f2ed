"""Transport over RCCL (or NCCL: the interface is the same): tensors go from GPU to GPU, matched by order.

Everything but tensors goes over another transport of the same ranks, the *control*: ids of communicators, `exchange`,
reports, and the news of failures. Communicators are made when the transport is, by `split` and by `connect`, in one
order on all ranks; none is made later.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any, get_args

import torch

from pipert.comm.buffers import as_bytes, check_dense, check_parts, check_peer, check_tag
from pipert.comm.collectives import check_arithmetic
from pipert.comm.counters import Counters
from pipert.comm.errors import HangError, JobAborted, MessageError, OptionError, TransportError
from pipert.comm.rccl_agree import SEMANTICS, Channel, agree, check_same
from pipert.comm.rccl_family import Family, Use
from pipert.comm.rccl_lanes import Lane, Operation, RcclRequest, Settling, launch
from pipert.comm.rccl_library import RcclError
from pipert.comm.rccl_pairs import Pair, rounds
from pipert.comm.rccl_streams import on_device
from pipert.comm.rccl_sums import SUMMED, summable
from pipert.comm.reduction import reduce_in_order
from pipert.comm.transport import Request, Transport

#: Seconds in which the cause of a failure arrives from the rank that has broken a communicator off.
_CAUSE = 1.0


class _Done:
    """A request that was complete when it was started."""

    def test(self) -> bool:
        """True."""
        return True


class RcclTransport(Transport):
    """Messages and collectives among GPUs. Made by `over` and `split`; used from one thread.

    An operation runs on a stream beside torch's current one, behind all that was started there before: so computing
    and communicating overlap, and a tensor may be sent as soon as the computation that makes it was started. `wait`
    holds the rank until the operation is over; what the rank starts then may use the result.

    Between two ranks a receive gets the next message, whatever its tag. With ``channel="pair"`` all messages of two
    ranks share a queue, in which those of a `group` start together; with ``"direction"`` each direction has its own.
    The collectives of a transport share another one.

    Attributes:
        device: where tensors must be.
        counters: messages and bytes started here, by kind.
    """

    def __init__(self, family: Family, control: Transport, lane: Lane) -> None:
        """Use a communicator of the control's ranks; see `over`."""
        self._family, self._control, self._lane = family, control, lane
        self._library, self.device = family.library, family.device
        self.rank, self.size, self.tag_bound = control.rank, control.size, control.tag_bound
        self.semantics: Mapping[str, object] = MappingProxyType(dict(SEMANTICS[family.channel]))
        self.counters = Counters()
        self._connected: set[Pair] = set()
        self._to: dict[int, Lane] = {}
        self._from: dict[int, Lane] = {}
        self._group: list[Operation] | None = None

    @classmethod
    def over(cls, control: Transport, channel: Channel = "pair") -> RcclTransport:
        """Make one for all ranks of a transport, on the GPU that is each rank's current one. Collective.

        Args:
            control: what everything else goes over; `close` closes it.
            channel: which messages share a queue: a communicator and its stream.

        Raises:
            OptionError: an unknown channel.
            TransportError: on every rank, if one of them has no library or no GPU, or asks for something else.
            RcclError: the library cannot make the communicator.
        """
        if channel not in get_args(Channel):
            raise OptionError(f"channel = {channel!r} is unknown; use one of {', '.join(get_args(Channel))}")
        library, device, identity = agree(control, channel)
        family = Family(library, device, channel)
        with on_device(device):
            lane = family.lane(library.init(control.size, identity, control.rank), "none")
        transport = cls(family, control, lane)
        transport._settle([lane], f"making an RCCL communicator of {control.size} ranks")
        return transport

    # ---- messages ---------------------------------------------------------------------------------------------------

    def connect(self, pairs: Iterable[Pair]) -> None:
        """See `Transport.connect`: makes a communicator for each pair of ranks, or one for each direction.

        Raises:
            MessageError: a number that is no rank.
            TransportError: on every rank, if they give different pairs or a GPU runs too few queues at once.
        """
        wanted = sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]} - self._connected)
        for rank in {rank for pair in wanted for rank in pair}:
            check_peer(rank, self.size, "rank")
        check_same(self.exchange(json.dumps(wanted).encode()), "connects the pairs")
        mine = sum(self.rank in pair for pair in wanted)
        self._family.check_queues(self.exchange, messages=mine * (2 if self._family.channel == "direction" else 1))
        for disjoint in rounds(wanted):
            self._connect(next((pair for pair in disjoint if self.rank in pair), None))
        self._connected.update(wanted)

    def _connect(self, pair: Pair | None) -> None:
        """Make this rank's lanes of one round, and try them, so that no later message has to wait for a connection."""
        color = None if pair is None else pair[0]
        up = self._divide(color, self.rank, "messages")
        down = self._divide(color, self.rank, "messages") if self._family.channel == "direction" else up
        if pair is None or up is None or down is None:
            return
        peer = pair[pair[0] == self.rank]
        self._to[peer], self._from[peer] = (up, down) if self.rank < peer else (down, up)
        trial = torch.zeros(2, dtype=torch.uint8, device=self.device)
        with self.group():
            requests = [self.isend(trial[:1], peer, 0), self.irecv(trial[1:], peer, 0)]
        for request in requests:
            self.wait(request, "the first message of a pair", peer)

    def isend(self, tensor: torch.Tensor, dest: int, tag: int) -> Request:
        """See `Transport.isend`. The tag says nothing.

        Raises:
            MessageError: before anything is sent; a tensor that is not dense memory on this rank's GPU, a wrong rank or
                tag, or a rank that this one is not connected with.
            JobAborted: another rank failed first.
            RcclError: the library refuses.
        """
        return self._message("send", "ncclSend", self._to, tensor, dest, tag)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int) -> Request:
        """See `Transport.irecv`: the next message from that rank, whatever its tag.

        Raises:
            MessageError, JobAborted, RcclError: as `isend`.
        """
        return self._message("receive", "ncclRecv", self._from, tensor, source, tag)

    def _message(
        self, kind: str, function: str, lanes: Mapping[int, Lane], tensor: torch.Tensor, peer: int, tag: int
    ) -> Request:
        check_tag(tag, self.tag_bound)
        peer = check_peer(peer, self.size, "dest" if kind == "send" else "source")
        memory = as_bytes(self._here(tensor))
        lane = lanes.get(peer)
        if lane is None:
            raise MessageError(
                f"a {kind} between ranks {self.rank} and {peer}, which are not connected; call connect with all pairs "
                "that exchange messages, on every rank, before the first one"
            )
        arguments = (self._at(memory), memory.numel(), self._number("ncclUint8"), int(peer > self.rank))
        return self._start(kind, lane, function, arguments, (memory,))

    @contextmanager
    def group(self) -> Iterator[None]:
        """See `Transport.group`.

        Raises:
            TransportError: inside another group.
        """
        if self._group is not None:
            raise TransportError("a group of messages begins inside another one; end that one first")
        self._group = []
        try:
            yield
            operations = self._group
        finally:
            self._group = None
        if operations:
            self._launch(operations)

    def _launch(self, operations: Sequence[Operation]) -> None:
        with self._first_cause():
            launch(operations, self._settle)

    def _start(
        self,
        kind: str,
        lane: Lane,
        function: str,
        arguments: tuple[Any, ...],
        tensors: Sequence[torch.Tensor],
        finish: Callable[[], object] | None = None,
    ) -> Request:
        """Start an operation, or add it to the group that is open."""
        nbytes = max(tensor.nbytes for tensor in tensors)
        self.counters.record(kind, nbytes)
        if not nbytes:
            return _Done()  # the other ranks know, too
        request = RcclRequest(lane, tensors, finish)
        operation = Operation(lane, function, arguments, tensors, request)
        if self._group is None:
            self._launch([operation])
        else:
            self._group.append(operation)
        return request

    # ---- collectives ------------------------------------------------------------------------------------------------

    def iallreduce(self, tensor: torch.Tensor, op: str = "sum") -> Request:
        """See `Transport.iallreduce`; sums in the library's order. A maximum gathers all tensors: NaNs propagate.

        Raises:
            MessageError: the tensor or op cannot be reduced.
        """
        check_arithmetic(tensor.dtype, op)
        flat = self._here(tensor).detach().view(-1)
        if op == "max":
            rows = flat.new_empty((self.size, flat.numel()))
            return self._gather("allreduce", rows, flat, lambda: flat.copy_(reduce_in_order(list(rows), "max")))
        wide = summable(flat)
        finish = None if wide.data_ptr() == flat.data_ptr() else lambda: flat.copy_(wide)
        arguments = (self._at(wide), self._at(wide), wide.numel(), *self._sum_of(wide))
        return self._start("allreduce", self._lane, "ncclAllReduce", arguments, (wide,), finish)

    def ireduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor) -> Request:
        """See `Transport.ireduce_scatter`; sums in the library's order.

        Raises:
            MessageError: the tensors cannot be summed, or their sizes do not fit.
        """
        check_arithmetic(tensor.dtype, "sum")
        check_parts(tensor, out, self.size, "reduce_scatter")
        wide, target = summable(self._here(tensor).detach().view(-1)), self._here(out).detach().view(-1)
        part = summable(target)
        finish = None if part.data_ptr() == target.data_ptr() else lambda: target.copy_(part)
        arguments = (self._at(wide), self._at(part), part.numel(), *self._sum_of(wide))
        return self._start("reduce_scatter", self._lane, "ncclReduceScatter", arguments, (wide, part), finish)

    def iallgather(self, out: torch.Tensor, tensor: torch.Tensor) -> Request:
        """See `Transport.iallgather`; ``tensor`` may be this rank's part of ``out``.

        Raises:
            MessageError: the tensors are not dense, or their sizes do not fit.
        """
        check_parts(out, tensor, self.size, "allgather")
        return self._gather("allgather", self._here(out), self._here(tensor), None)

    def _gather(
        self, kind: str, out: torch.Tensor, tensor: torch.Tensor, finish: Callable[[], object] | None
    ) -> Request:
        whole, own = as_bytes(out), as_bytes(tensor)
        arguments = (self._at(own), self._at(whole), own.numel(), self._number("ncclUint8"))
        return self._start(kind, self._lane, "ncclAllGather", arguments, (whole, own), finish)

    def ibroadcast(self, tensor: torch.Tensor, root: int) -> Request:
        """See `Transport.ibroadcast`.

        Raises:
            MessageError: the tensor is not dense, or root is no rank.
        """
        root = check_peer(root, self.size, "root")
        memory = as_bytes(self._here(tensor))
        arguments = (self._at(memory), self._at(memory), memory.numel(), self._number("ncclUint8"), root)
        return self._start("broadcast", self._lane, "ncclBroadcast", arguments, (memory,))

    def _here(self, tensor: torch.Tensor) -> torch.Tensor:
        check_dense(tensor)
        if tensor.device != self.device:
            raise MessageError(f"the tensor is on {tensor.device}, but this rank's RCCL moves {self.device}'s; copy it")
        return tensor

    def _at(self, tensor: torch.Tensor) -> Any:
        return self._library.ffi.cast("void *", tensor.data_ptr())

    def _number(self, name: str) -> Any:
        return getattr(self._library.functions, name)

    def _sum_of(self, tensor: torch.Tensor) -> tuple[Any, Any]:
        return self._number(SUMMED[tensor.dtype]), self._number("ncclSum")

    # ---- waiting ----------------------------------------------------------------------------------------------------

    def wait(self, request: Request, doing: object = "", peer: int | None = None) -> None:
        """See `Transport.wait`.

        Raises:
            HangError: the deadline passed.
            JobAborted: another rank failed first.
            RcclError: the operation failed.
            TransportError: its group is still open.
        """
        if isinstance(request, RcclRequest) and not request.started:
            raise TransportError(f"rank {self.rank} waits for an operation of a group that is still open: {doing}")
        try:
            with self._first_cause():
                self._control.wait(request, doing, peer)
        except (JobAborted, HangError):
            self._family.end()
            raise

    def _settle(self, lanes: Sequence[Lane], doing: str = "starting operations of RCCL") -> None:
        self.wait(Settling(lanes), doing)

    @contextmanager
    def _first_cause(self) -> Iterator[None]:
        """Where a communicator is found broken: raise what another rank has failed with before, if one has."""
        try:
            yield
        except RcclError:
            until = time.monotonic() + _CAUSE
            while time.monotonic() < until:
                self._control.progress()
                time.sleep(0.01)
            raise

    def progress(self) -> None:
        """See `Transport.progress`. Operations need no help."""
        self._control.progress()

    def report(self, doing: object) -> None:
        """See `Transport.report`."""
        self._control.report(doing)

    def exchange(self, blob: bytes) -> list[bytes]:
        """See `Transport.exchange`; over the control."""
        return self._control.exchange(blob)

    # ---- groups and the end -----------------------------------------------------------------------------------------

    @property
    def control(self) -> Transport:
        """See `Transport.control`."""
        return self._control

    def split(self, color: int | None, key: int) -> RcclTransport | None:
        """See `Transport.split`.

        Raises:
            HangError, JobAborted, RcclError: as `wait`.
            TransportError: on every rank, if a GPU runs too few queues at once.
        """
        control = self._control.split(color, key)
        several = control is not None and control.size > 1
        self._family.check_queues(self.exchange, groups=int(several))
        lane = self._divide(color, key, "group" if several else "none")
        return None if control is None or lane is None else RcclTransport(self._family, control, lane)

    def _divide(self, color: int | None, key: int, use: Use) -> Lane | None:
        """A lane for the ranks of each color."""
        with on_device(self.device), self._first_cause():
            place = self._library.split(self._lane.comm, color, key)
        lane = None if place is None else self._family.lane(place, use)
        self._settle([self._lane] if lane is None else [self._lane, lane], "dividing an RCCL communicator")
        return lane

    def abort(self, error: BaseException) -> None:
        """See `Transport.abort`."""
        self._control.abort(error)
        self._family.end()

    def close(self) -> None:
        """Give the communicators back, and close the control. Every rank closes, in the same order. Idempotent.

        Raises:
            HangError: an operation is still under way and does not end.
        """
        own = dict.fromkeys([*self._to.values(), *self._from.values(), self._lane])
        lanes = [lane for lane in own if lane in self._family.lanes]
        with suppress(JobAborted, RcclError):
            for lane in lanes:
                lane.finalize()
            if lanes:
                self._settle(lanes, "closing communicators of RCCL")
        for lane in lanes:
            lane.close()
            self._family.lanes.pop(lane, None)
        self._control.close()
