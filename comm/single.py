"""A group of one rank: every collective is its own result, and there is nobody to send to."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pipert.comm.buffers import check_dense, check_parts, check_peer
from pipert.comm.errors import MessageError, TransportError
from pipert.comm.reduction import check_reduction
from pipert.comm.transport import Request, Transport


class _Done:
    """A request that was complete when it was started."""

    def test(self) -> bool:
        """True."""
        return True


class SingleTransport(Transport):
    """The transport of one rank alone. Costs nothing: nothing is copied but from input to output, and nothing waits."""

    def __init__(self, parent: Transport | None = None) -> None:
        """Make one.

        Args:
            parent: the job that the rank is part of, if any. Reports, aborts, progress and waits are passed on to it.
        """
        self.rank = 0
        self.size = 1
        self.tag_bound = 32768 if parent is None else parent.tag_bound
        self.device = torch.device("cpu") if parent is None else parent.device
        self.semantics: Mapping[str, object] = {"name": "single"} if parent is None else parent.semantics
        self._parent = parent

    def isend(self, tensor: torch.Tensor, dest: int, tag: int) -> Request:
        """Refuse: there is nobody else.

        Raises:
            MessageError: always.
        """
        raise self._alone("sends to", dest)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int) -> Request:
        """Refuse: there is nobody else.

        Raises:
            MessageError: always.
        """
        raise self._alone("receives from", source)

    def _alone(self, does: str, peer: int) -> MessageError:
        return MessageError(f"a group of one {does} rank {peer}, but there is nobody else; use the tensor itself")

    def iallreduce(self, tensor: torch.Tensor, op: str = "sum") -> Request:
        """Leave the tensor as it is.

        Raises:
            MessageError: larger groups would refuse the tensor or op, too.
        """
        check_dense(tensor)
        check_reduction(tensor.dtype, op)
        return _Done()

    def ireduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor) -> Request:
        """Copy the tensor.

        Raises:
            MessageError: larger groups would refuse the tensors, too.
        """
        check_reduction(tensor.dtype, "sum")
        return self._copy(out, tensor, "reduce_scatter")

    def iallgather(self, out: torch.Tensor, tensor: torch.Tensor) -> Request:
        """Copy the tensor.

        Raises:
            MessageError: larger groups would refuse the tensors, too.
        """
        return self._copy(out, tensor, "allgather")

    def _copy(self, out: torch.Tensor, tensor: torch.Tensor, what: str) -> Request:
        check_dense(out)
        check_dense(tensor)
        check_parts(out, tensor, 1, what)
        if out.data_ptr() != tensor.data_ptr():
            out.detach().view(-1).copy_(tensor.detach().view(-1))
        return _Done()

    def ibroadcast(self, tensor: torch.Tensor, root: int) -> Request:
        """Leave the tensor as it is.

        Raises:
            MessageError: larger groups would refuse the tensor or root, too.
        """
        check_dense(tensor)
        check_peer(root, 1, "root")
        return _Done()

    def exchange(self, blob: bytes) -> list[bytes]:
        """Give the blob back."""
        return [bytes(blob)]

    def wait(self, request: Request, doing: object = "", peer: int | None = None) -> None:
        """Pass a request of the parent's on to it; those started here are complete.

        Raises:
            TransportError: there is no parent, and the request is not complete.
        """
        if request.test():
            return
        if self._parent is None:
            raise TransportError("a world of one waits for a request that no other rank can complete")
        self._parent.wait(request, doing)

    def progress(self) -> None:
        """Drive the parent."""
        if self._parent is not None:
            self._parent.progress()

    def report(self, doing: object) -> None:
        """Tell the parent."""
        if self._parent is not None:
            self._parent.report(doing)

    def split(self, color: int | None, key: int) -> SingleTransport | None:
        """Make another one, or none."""
        return None if color is None else SingleTransport(self._parent)

    def abort(self, error: BaseException) -> None:
        """Tell the parent."""
        if self._parent is not None:
            self._parent.abort(error)

    def close(self) -> None:
        """Release nothing."""
