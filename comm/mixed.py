"""Two transports as one: tensors on the GPU go over RCCL, everything else over the transport it was made with."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch

from pipert.comm.counters import Counters
from pipert.comm.rccl import RcclTransport
from pipert.comm.rccl_agree import Channel
from pipert.comm.transport import Request, Transport


class MixedTransport(Transport):
    """RCCL for tensors where RCCL can reach them; MPI (say) for sizes, other tensors and control.

    Both ends of a message must keep the tensor in the same kind of memory, and so must all ranks of a collective. The
    order rules are RCCL's: what goes over the other transport waits for less.
    """

    def __init__(self, tensors: RcclTransport) -> None:
        """Route between RCCL and its control; see `over`."""
        self._tensors = tensors
        self.rank, self.size, self.tag_bound = tensors.rank, tensors.size, tensors.tag_bound
        self.device, self.semantics = tensors.device, tensors.semantics

    @classmethod
    def over(cls, control: Transport, channel: Channel = "pair") -> MixedTransport:
        """Make one beside a transport, which it takes over; arguments and errors are `RcclTransport.over`'s."""
        return cls(RcclTransport.over(control, channel))

    @property
    def control(self) -> Transport:
        """See `Transport.control`."""
        return self._tensors.control

    @property
    def counters(self) -> Counters:
        """What has gone over RCCL, by kind."""
        return self._tensors.counters

    def _for(self, tensor: torch.Tensor) -> Transport:
        return self._tensors if tensor.device == self._tensors.device else self.control

    def isend(self, tensor: torch.Tensor, dest: int, tag: int) -> Request:
        """See `Transport.isend`."""
        return self._for(tensor).isend(tensor, dest, tag)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int) -> Request:
        """See `Transport.irecv`."""
        return self._for(tensor).irecv(tensor, source, tag)

    def iallreduce(self, tensor: torch.Tensor, op: str = "sum") -> Request:
        """See `Transport.iallreduce`."""
        return self._for(tensor).iallreduce(tensor, op)

    def ireduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor) -> Request:
        """See `Transport.ireduce_scatter`."""
        return self._for(tensor).ireduce_scatter(out, tensor)

    def iallgather(self, out: torch.Tensor, tensor: torch.Tensor) -> Request:
        """See `Transport.iallgather`."""
        return self._for(tensor).iallgather(out, tensor)

    def ibroadcast(self, tensor: torch.Tensor, root: int) -> Request:
        """See `Transport.ibroadcast`."""
        return self._for(tensor).ibroadcast(tensor, root)

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """See `Transport.connect`."""
        self._tensors.connect(pairs)

    def group(self) -> AbstractContextManager[None]:
        """See `Transport.group`; what goes over the other transport starts at once."""
        return self._tensors.group()

    def exchange(self, blob: bytes) -> list[bytes]:
        """See `Transport.exchange`."""
        return self._tensors.exchange(blob)

    def wait(self, request: Request, doing: object = "", peer: int | None = None) -> None:
        """See `Transport.wait`; requests of both."""
        self._tensors.wait(request, doing, peer)

    def progress(self) -> None:
        """See `Transport.progress`."""
        self._tensors.progress()

    def report(self, doing: object) -> None:
        """See `Transport.report`."""
        self._tensors.report(doing)

    def split(self, color: int | None, key: int) -> MixedTransport | None:
        """See `Transport.split`."""
        part = self._tensors.split(color, key)
        return None if part is None else MixedTransport(part)

    def abort(self, error: BaseException) -> None:
        """See `Transport.abort`."""
        self._tensors.abort(error)

    def close(self) -> None:
        """See `Transport.close`."""
        self._tensors.close()
