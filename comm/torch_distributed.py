"""Transport over an existing torch.distributed process group, for trainers that already have one.

Tested with gloo (messages matched by tag, complete on rendezvous). With nccl, messages between two ranks are matched by
their order and share one queue per pair of ranks, and tags are ignored: `TorchTransport.semantics` says so, and the
verifier takes it from there.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from pipert.comm.buffers import as_bytes, check_dense, check_parts, check_peer, check_tag
from pipert.comm.counters import Counters
from pipert.comm.errors import HangError, JobAborted, MessageError, OptionError, TransportError
from pipert.comm.reduction import check_reduction, reduce_in_order
from pipert.comm.torch_requests import BackgroundRequest, Done, StreamRequest, TorchRequest, Waiters
from pipert.comm.transport import Request, Transport
from pipert.comm.wait import wait_for_foreign

_SEMANTICS: Mapping[str, Mapping[str, object]] = {
    "gloo": {"name": "torch-gloo", "matching": "tag", "channel": "message"},
    "nccl": {"name": "torch-nccl", "matching": "order", "channel": "pair"},
}
_DEVICES = {"gloo": "cpu", "nccl": "cuda"}
#: Where the first cause of a failure is left for the other ranks.
_CAUSE = "pipert/first cause"
#: Seconds between two looks at it.
_LOOK = 0.5


class TorchTransport(Transport):
    """Point-to-point messages and collectives over a ``torch.distributed`` group.

    Messages travel as bytes, so every dtype does. fp16 and bf16 are summed in fp32 and rounded once. A maximum gathers
    all inputs first, because gloo's own lets NaNs vanish. A wait sleeps and looks twice a second whether another rank
    has left the cause of a failure in the default group's store, or the deadline has passed.

    Attributes:
        device: with NCCL the GPU that was current when the transport was made.
        counters: messages and bytes started here, by kind.
    """

    def __init__(self, group: dist.ProcessGroup, deadline: float, waiters: Waiters) -> None:
        """Use ``group``, which stays its maker's; see `over`."""
        self._group = group
        self._backend = dist.get_backend(group)
        if self._backend not in _SEMANTICS:
            raise TransportError(f"the process group's backend is {self._backend!r}; use a gloo or an nccl group")
        self._ranks = dist.get_process_group_ranks(group)
        self._deadline = deadline
        self._waiters = waiters
        self._closed = False
        self._looked = time.monotonic()
        self._doing: object = ""
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.tag_bound = 2**31
        if self._backend == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.semantics: Mapping[str, object] = MappingProxyType(dict(_SEMANTICS[self._backend]))
        self.counters = Counters()

    @classmethod
    def over(cls, group: dist.ProcessGroup | None = None, deadline: float | None = None) -> TorchTransport:
        """Use a process group; the default one unless another is given.

        Args:
            group: the host program's; closing the transport leaves it as it is.
            deadline: seconds that one wait may take; None for 300.

        Raises:
            TransportError: ``torch.distributed`` is not initialised, this rank is not of the group, or its backend is
                neither gloo nor nccl.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise TransportError(
                "torch.distributed is not initialised; call torch.distributed.init_process_group first"
            )
        group = dist.group.WORLD if group is None else group
        if not isinstance(group, dist.ProcessGroup):
            raise TransportError(f"this rank is not a member of the process group given ({group!r})")
        return cls(group, 300.0 if deadline is None else deadline, Waiters())

    # ---- messages --------------------------------------------------------------------------------------------------

    def isend(self, tensor: torch.Tensor, dest: int, tag: int) -> Request:
        """See `Transport.isend`.

        Raises:
            MessageError: the tensor is not dense, is on another device than the backend's, or rank or tag are out of
                bounds.
        """
        return self._message("send", dist.isend, tensor, check_peer(dest, self.size, "dest"), tag)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int) -> Request:
        """See `Transport.irecv`.

        Raises:
            MessageError: as for `isend`.
        """
        return self._message("receive", dist.irecv, tensor, check_peer(source, self.size, "source"), tag)

    def _message(
        self, kind: str, start: Callable[..., dist.Work | None], tensor: torch.Tensor, peer: int, tag: int
    ) -> Request:
        tag = check_tag(tag, self.tag_bound)
        memory = as_bytes(self._on_device(tensor))
        if peer == self.rank:
            raise MessageError(f"rank {peer} {kind}s a message to or from itself; torch.distributed has none such")
        self.counters.record(kind, memory.numel())
        if not memory.numel():
            return Done()  # both sides know
        return self._request(functools.partial(start, memory, self._ranks[peer], group=self._group, tag=tag))

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        check_dense(tensor)
        device = _DEVICES[self._backend]
        if tensor.device.type != device:
            raise MessageError(
                f"the message is on {tensor.device}, but {self._backend} moves {device} tensors; copy it there"
            )
        return tensor

    def _request(self, start: Callable[[], dist.Work | None], finish: Callable[[], object] | None = None) -> Request:
        if self._closed:
            raise TransportError(f"rank {self.rank} starts an operation on a transport that it has closed")
        try:
            work = start()
        except RuntimeError as error:
            raise self._cause_or(error) from error
        if work is None:
            raise AssertionError("torch.distributed gave no work although this rank is of the group")
        if self._backend == "gloo":
            return BackgroundRequest(self._waiters, work, start, finish, self._cause_or)
        return StreamRequest(work, start, finish, self._cause_or)

    # ---- collectives -----------------------------------------------------------------------------------------------

    def iallreduce(self, tensor: torch.Tensor, op: str = "sum") -> Request:
        """See `Transport.iallreduce`. Bitwise the same on every rank; sums in the backend's order.

        Raises:
            MessageError: the tensor or op cannot be reduced.
        """
        check_reduction(tensor.dtype, op)
        flat = self._on_device(tensor).detach().view(-1)
        self.counters.record("allreduce", flat.numel() * flat.element_size())
        if not flat.numel():
            return Done()
        if op == "max":
            parts = flat.new_empty((self.size, flat.numel()))
            gather = functools.partial(dist.all_gather_into_tensor, as_bytes(parts), as_bytes(flat), self._group, True)
            return self._request(gather, lambda: flat.copy_(reduce_in_order(list(parts), "max")))
        wide = _summed_in(flat)
        reduce = functools.partial(dist.all_reduce, wide, group=self._group, async_op=True)
        return self._request(reduce, None if wide is flat else lambda: flat.copy_(wide))

    def ireduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor) -> Request:
        """See `Transport.ireduce_scatter`; sums in the backend's order.

        Raises:
            MessageError: the tensors cannot be reduced, or their sizes do not fit.
        """
        check_reduction(tensor.dtype, "sum")
        target, flat = self._on_device(out).detach().view(-1), self._on_device(tensor).detach().view(-1)
        check_parts(flat, target, self.size, "reduce_scatter")
        self.counters.record("reduce_scatter", flat.numel() * flat.element_size())
        if not flat.numel():
            return Done()
        wide = _summed_in(flat)
        part = target if wide is flat else wide.new_empty(target.shape)
        reduce = functools.partial(dist.reduce_scatter_tensor, part, wide, group=self._group, async_op=True)
        return self._request(reduce, None if part is target else lambda: target.copy_(part))

    def iallgather(self, out: torch.Tensor, tensor: torch.Tensor) -> Request:
        """See `Transport.iallgather`; ``tensor`` may be this rank's part of ``out``.

        Raises:
            MessageError: the tensors are not dense, or their sizes do not fit.
        """
        check_parts(out, tensor, self.size, "allgather")
        target, memory = as_bytes(self._on_device(out)), as_bytes(self._on_device(tensor))
        self.counters.record("allgather", target.numel())
        if not memory.numel():
            return Done()
        return self._request(functools.partial(dist.all_gather_into_tensor, target, memory, self._group, True))

    def ibroadcast(self, tensor: torch.Tensor, root: int) -> Request:
        """See `Transport.ibroadcast`.

        Raises:
            MessageError: the tensor is not dense, or root is no rank.
        """
        source = self._ranks[check_peer(root, self.size, "root")]
        memory = as_bytes(self._on_device(tensor))
        self.counters.record("broadcast", memory.numel())
        if not memory.numel():
            return Done()
        return self._request(functools.partial(dist.broadcast, memory, source, self._group, True))

    def exchange(self, blob: bytes) -> list[bytes]:
        """See `Transport.exchange`.

        Raises:
            HangError: not every rank enters it before the deadline.
            JobAborted: another rank failed first.
        """
        self.counters.record("exchange", len(blob))
        device = _DEVICES[self._backend]
        lengths = torch.zeros(self.size, dtype=torch.int64, device=device)
        self._gather(lengths, torch.tensor([len(blob)], device=device))
        longest = max(1, int(lengths.max()))
        padded = torch.frombuffer(bytearray(blob.ljust(longest, b"\0")), dtype=torch.uint8).to(device)
        everybody = torch.empty(self.size * longest, dtype=torch.uint8, device=device)
        self._gather(everybody, padded)
        rows = everybody.cpu().numpy().reshape(self.size, longest)
        return [row[:length].tobytes() for row, length in zip(rows, lengths.tolist(), strict=True)]

    def _gather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        self.wait(
            self._request(functools.partial(dist.all_gather_into_tensor, out, tensor, self._group, True)), "exchange"
        )

    # ---- waiting ---------------------------------------------------------------------------------------------------

    def wait(self, request: Request, doing: object = "", peer: int | None = None) -> None:
        """See `Transport.wait`. The backend's own threads drive all operations; requests of others are polled.

        Raises:
            HangError: the deadline passed.
            JobAborted: another rank failed first, and said so.
            TransportError: the backend reports an error, as it does when another rank's process has died.
        """
        if not isinstance(request, TorchRequest):
            wait_for_foreign(self, request, doing, self._deadline)
            return
        end = time.monotonic() + self._deadline
        while not request.wait(min(_LOOK, max(0.0, end - time.monotonic()))):
            self.progress()
            if time.monotonic() >= end:
                owed = "" if peer is None else f" for rank {peer}"
                error = HangError(
                    f"rank {self.rank} has waited {self._deadline:g} s, its deadline, "
                    f"in {doing or self._doing or 'an operation'}{owed}"
                )
                self.abort(error)
                raise error

    def progress(self) -> None:
        """Look, twice a second at the most, whether another rank has left the cause of a failure.

        Raises:
            JobAborted: one has.
        """
        now = time.monotonic()
        if now - self._looked >= _LOOK:
            self._looked = now
            cause = self._cause()
            if cause is not None:
                raise JobAborted(cause)

    def report(self, doing: object) -> None:
        """Note what this rank does, for its own hang report."""
        self._doing = doing

    def abort(self, error: BaseException) -> None:
        """Leave the cause in the default group's store, where the waits of all other ranks find it."""
        text = f"rank {dist.get_rank()} failed first: {type(error).__name__}: {error}"
        try:
            _store().compare_set(_CAUSE, "", text)
        except RuntimeError:
            return  # the store is gone, and with it the rank that keeps it: nobody is left to tell

    def _cause(self) -> str | None:
        """What another rank has left, if anything."""
        try:
            store = _store()
            return store.get(_CAUSE).decode() if store.check([_CAUSE]) else None
        except RuntimeError as error:
            return f"the store of torch.distributed cannot be reached, its rank has probably failed: {error}"

    def _cause_or(self, error: Exception) -> JobAborted | TransportError:
        cause = self._cause()
        if cause is not None:
            return JobAborted(cause)
        return TransportError(f"{self._backend} reports an error; another rank has probably failed: {error}")

    # ---- groups ----------------------------------------------------------------------------------------------------

    def split(self, color: int | None, key: int) -> TorchTransport | None:
        """See `Transport.split`.

        Raises:
            OptionError: keys that would order ranks otherwise than they are; torch.distributed cannot.
            HangError, JobAborted: as for `exchange`.
        """
        answers = [json.loads(blob) for blob in self.exchange(json.dumps([color, key, _groups_made()]).encode())]
        colors = [answer[0] for answer in answers]
        for each in set(colors) - {None}:
            keys = [answer[1] for answer in answers if answer[0] == each]
            if keys != sorted(keys):
                raise OptionError(
                    f"the keys {keys} of color {each} reorder its ranks; torch.distributed keeps their order"
                )
        self.counters.record("split", 0)
        members = {each: [self._ranks[r] for r, c in enumerate(colors) if c == each] for each in dict.fromkeys(colors)}
        if self.size == dist.get_world_size():
            groups = {each: self._new_group(ranks) for each, ranks in members.items() if each is not None}
            group = groups.get(color)
        else:
            self._check_groups_made({answer[2] for answer in answers})
            # Ranks without a color make a group too, or their count of groups would stay behind.
            group = self._new_group(members[color], use_local_synchronization=True)
        return None if color is None or group is None else TorchTransport(group, self._deadline, self._waiters)

    def _new_group(self, ranks: list[int], use_local_synchronization: bool = False) -> dist.ProcessGroup | None:
        group: dist.ProcessGroup | None = dist.new_group(
            ranks,
            timedelta(seconds=self._deadline),
            self._backend,
            use_local_synchronization=use_local_synchronization,
        )
        return group

    def _check_groups_made(self, counts: set[int]) -> None:
        """A group made by a part of the ranks is named after how many groups each has made; other names never meet."""
        if len(counts) > 1:
            raise TransportError(
                f"the ranks of this group have made {sorted(counts)} process groups so far, and torch.distributed can "
                "divide a part of the ranks only where all have made as many; lay the mesh over the default group"
            )

    def close(self) -> None:
        """Refuse further operations. The process groups live on in torch.distributed. Idempotent."""
        self._closed = True


def _summed_in(flat: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy in the dtype that it is summed in on the wire: fp32, or int32, which gloo knows."""
    if flat.dtype.itemsize >= 4 or flat.dtype.is_complex:
        return flat
    return flat.to(torch.float32 if flat.dtype.is_floating_point else torch.int32)


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _groups_made() -> int:
    return len(dist.distributed_c10d._world.pg_names)  # nothing public tells
