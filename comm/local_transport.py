"""One rank's end of a local job: the transport interface over the fabric that the rank threads share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from types import MappingProxyType

import torch

from pipert.comm.buffers import as_bytes, check_dense, check_parts, check_peer, check_tag
from pipert.comm.counters import Counters
from pipert.comm.errors import TransportError
from pipert.comm.local_fabric import Fabric
from pipert.comm.local_matching import Rules
from pipert.comm.local_operations import Collective, Group, Operation, Receive, Send
from pipert.comm.reduction import check_reduction, reduce_in_order
from pipert.comm.transport import Request, Transport
from pipert.comm.wait import wait_for_foreign


class LocalTransport(Transport):
    """One rank's end of a local job; made by `run_ranks`.

    Bytes are copied from the sender's tensor into the receiver's when the message is delivered, so a sender that
    changes its tensor before its send is complete is found out in rendezvous mode. A receive fills its tensor with 0xFF
    bytes (NaN) until its message comes, so that reading too early is found out too. Collectives complete when every
    rank has entered them; sums run in rank order, in fp32 for narrower floats. Collectives are not part of a channel,
    except where ``channel="rank"``: there they queue with the rank's messages.

    A transport belongs to the thread of its rank.

    Attributes:
        counters: messages and bytes started here, by kind.
    """

    def __init__(self, fabric: Fabric, rules: Rules, group: Group, me: int) -> None:
        """Join ``group`` as rank ``me`` of the whole job."""
        self.rank = group.ranks.index(me)
        self.size = len(group.ranks)
        self.tag_bound = rules.tag_bound
        named = asdict(rules)
        del named["tag_bound"]
        self.semantics: Mapping[str, object] = MappingProxyType({"name": "local", **named})
        self.counters = Counters()
        self._fabric = fabric
        self._rules = rules
        self._group = group
        self._me = me
        self._closed = False
        self._open: list[Operation] | None = None
        self._stalls = fabric.faults.stream("stall", me)

    # ---- messages --------------------------------------------------------------------------------------------------

    def isend(self, tensor: torch.Tensor, dest: int, tag: int) -> Request:
        """Start sending a tensor's memory. Waits here until it is complete where messages are blocking.

        Raises:
            MessageError: the tensor is not dense and contiguous, or the rank or tag is out of bounds.
            JobAborted: another rank failed first.
        """
        peer = self._group.ranks[check_peer(dest, self.size, "dest")]
        tag = check_tag(tag, self.tag_bound)
        memory = as_bytes(tensor)
        send = Send(driver=self._fabric, group=self._group, rank=self._me, peer=peer, tag=tag, memory=memory)
        return self._start_message(send, "send", memory)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int) -> Request:
        """Start receiving into a tensor's memory. Waits here until it is complete where messages are blocking.

        Raises:
            MessageError: as for `isend`; later, on all ranks, when the message has another size.
            JobAborted: another rank failed first.
        """
        peer = self._group.ranks[check_peer(source, self.size, "source")]
        tag = check_tag(tag, self.tag_bound)
        memory = as_bytes(tensor)
        memory.fill_(0xFF)
        receive = Receive(driver=self._fabric, group=self._group, rank=self._me, peer=peer, tag=tag, memory=memory)
        return self._start_message(receive, "receive", memory)

    def _start_message(self, operation: Operation, kind: str, memory: torch.Tensor) -> Request:
        self._post(operation, kind, memory.numel())
        if self._rules.blocking and self._open is None:
            self._fabric.wait(operation, "")
        return operation

    @contextmanager
    def group(self) -> Iterator[None]:
        """See `Transport.group`. Waits at its end until all is complete where messages are blocking.

        Raises:
            TransportError: inside another group.
            MessageError, JobAborted: as for what is started in it.
        """
        if not self._rules.grouped:
            yield
            return
        if self._open is not None:
            raise TransportError("a group of messages begins inside another one; end that one first")
        self._open = []
        try:
            yield
            unit = self._open
        finally:
            self._open = None
        if unit:
            self._fabric.post(*unit)
        for operation in unit if self._rules.blocking else ():
            self._fabric.wait(operation, "")

    def _post(self, operation: Operation, kind: str, nbytes: int) -> None:
        if self._closed:
            raise TransportError(f"rank {self.rank} starts a {kind} on a transport that it has closed")
        self.counters.record(kind, nbytes)
        if self._open is None:
            self._fabric.post(operation)
        else:
            self._open.append(operation)

    # ---- collectives -----------------------------------------------------------------------------------------------

    def iallreduce(self, tensor: torch.Tensor, op: str = "sum") -> Request:
        """Start reducing in place, in rank order.

        Raises:
            MessageError: the tensor or op cannot be reduced; later, on all ranks, when the ranks do not agree.
            JobAborted: another rank failed first.
        """
        check_dense(tensor)
        check_reduction(tensor.dtype, op)
        flat = tensor.detach().view(-1)

        def combine(parts: list[torch.Tensor]) -> list[torch.Tensor]:
            return [reduce_in_order(parts, op)] * len(parts)

        return self._start_collective("allreduce", flat, combine, flat, op)

    def ireduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor) -> Request:
        """Start summing in rank order; this rank gets its part.

        Raises:
            MessageError: as for `iallreduce`, or the sizes do not fit.
            JobAborted: another rank failed first.
        """
        check_dense(out)
        check_dense(tensor)
        check_reduction(tensor.dtype, "sum")
        check_parts(tensor, out, self.size, "reduce_scatter")

        def combine(parts: list[torch.Tensor]) -> list[torch.Tensor]:
            return list(reduce_in_order(parts, "sum").view(len(parts), out.numel()))

        return self._start_collective("reduce_scatter", tensor.detach().view(-1), combine, out.detach().view(-1))

    def iallgather(self, out: torch.Tensor, tensor: torch.Tensor) -> Request:
        """Start gathering in rank order; ``tensor`` may be this rank's part of ``out``.

        Raises:
            MessageError: a tensor is not dense, or the sizes do not fit; later, on all ranks, if they do not agree.
            JobAborted: another rank failed first.
        """
        check_parts(out, tensor, self.size, "allgather")

        def combine(parts: list[torch.Tensor]) -> list[torch.Tensor]:
            return [torch.cat(parts)] * len(parts)

        return self._start_collective("allgather", as_bytes(tensor), combine, as_bytes(out))

    def ibroadcast(self, tensor: torch.Tensor, root: int) -> Request:
        """Start copying root's tensor.

        Raises:
            MessageError: the tensor is not dense, or root is no rank; later, on all ranks, if they do not agree.
            JobAborted: another rank failed first.
        """
        root = check_peer(root, self.size, "root")
        memory = as_bytes(tensor)

        def combine(parts: list[torch.Tensor]) -> list[torch.Tensor]:
            return [parts[root].clone()] * len(parts)

        return self._start_collective("broadcast", memory, combine, memory, f"root={root}")

    def exchange(self, blob: bytes) -> list[bytes]:
        """Give every rank everybody's blob.

        Raises:
            HangError: not every rank enters it.
            MessageError: the ranks are in different collectives.
            JobAborted: another rank failed first.
        """
        return list(self._gather("exchange", bytes(blob), len(blob)).result)

    def split(self, color: int | None, key: int) -> LocalTransport | None:
        """Make a sub-transport of the ranks that give the same color, ordered by key, then by rank.

        Raises:
            HangError, MessageError, JobAborted: as for `exchange`.
        """
        gathered = self._gather("split", (color, key), 0)
        if color is None:
            return None
        members = sorted((order, rank) for rank, (other, order) in enumerate(gathered.result) if other == color)
        ranks = tuple(self._group.ranks[rank] for _, rank in members)
        group = Group((*self._group.key, gathered.number, color), ranks)
        return LocalTransport(self._fabric, self._rules, group, self._me)

    def _start_collective(
        self,
        kind: str,
        given: torch.Tensor,
        combine: Callable[[list[torch.Tensor]], list[torch.Tensor]],
        target: torch.Tensor,
        *details: str,
    ) -> Request:
        words = [*details, f"{given.numel()} x {str(given.dtype).removeprefix('torch.')}"]
        operation = Collective(
            driver=self._fabric,
            group=self._group,
            rank=self._me,
            kind=kind,
            signature=f"{kind}({', '.join(words)})",
            given=given,
            target=target,
            combine=combine,
        )
        nbytes = max(part.numel() * part.element_size() for part in (given, target))
        self._post(operation, kind, nbytes)
        return operation

    def _gather(self, kind: str, given: object, nbytes: int) -> Collective:
        operation = Collective(
            driver=self._fabric,
            group=self._group,
            rank=self._me,
            kind=kind,
            signature=kind,
            given=given,
            combine=lambda parts: [parts] * len(parts),
        )
        self._post(operation, kind, nbytes)
        self.wait(operation)
        return operation

    # ---- waiting ---------------------------------------------------------------------------------------------------

    def wait(self, request: Request, doing: object = "", peer: int | None = None) -> None:
        """Sleep until the request is done; others' deliveries go on meanwhile. ``peer`` is known from the request.

        Requests of another transport are polled.

        Raises:
            HangError: a deadlock, proved at once and raised on all ranks, or the deadline passed.
            MessageError: on all ranks, when two operations met that do not fit.
            JobAborted: another rank failed first.
            TransportError: it is of a group that is still open.
        """
        if isinstance(request, Operation) and request.driver is self._fabric:
            if not (request.unit or request.done):
                raise TransportError(f"rank {self.rank} waits for an operation of a group that is still open: {doing}")
            self._fabric.wait(request, doing)
        else:
            wait_for_foreign(self, request, doing, self._fabric.deadline)

    def progress(self) -> None:
        """Deliver what is due.

        Raises:
            JobAborted: another rank failed first.
        """
        self._fabric.poll(self._me)

    def report(self, doing: object) -> None:
        """Note what this rank does now; sleeps first where the fault plan stalls."""
        self._fabric.report(self._me, doing)
        if self._fabric.faults.stall:
            time.sleep(self._stalls.uniform(0, self._fabric.faults.stall))

    def abort(self, error: BaseException) -> None:
        """End the job for all ranks, with this cause."""
        self._fabric.fail(error, self._me)

    def close(self) -> None:
        """Refuse further operations."""
        self._closed = True
