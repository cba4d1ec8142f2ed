"""Starting messages on an MPI communicator, as lean as Python allows.

A short message takes two or three microseconds, so each call here is seen in the latency.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from pipert.comm.buffers import check_dense, check_peer, check_tag
from pipert.comm.doorbell import Doorbells
from pipert.comm.errors import CommError, MessageError, TransportError
from pipert.comm.transport import Request

#: Starts a message: tensor, peer, tag.
Starter = Callable[[torch.Tensor, int, int], Request]

#: A contiguous tensor of at most so many bytes may be lazily conjugated or negated: a complex one, or the single number
#: that is the imaginary part of one. Other dtypes cannot.
_LAZY: dict[torch.dtype, float] = {
    torch.complex32: float("inf"),
    torch.complex64: float("inf"),
    torch.complex128: float("inf"),
    torch.float16: 2,
    torch.float32: 4,
    torch.float64: 8,
}


class MpiRequest:
    """A message under way. Keeps its tensor alive.

    Attributes:
        test: drives MPI and tells whether the message is complete.
        tensor: the message.
        peer: the other rank, of the world.
    """

    __slots__ = ("peer", "tensor", "test")  # and no __init__: three stores cost less than a call

    test: Callable[[], bool]
    tensor: torch.Tensor
    peer: int


class Count(NamedTuple):
    """How many messages, and bytes in them, a starter has started."""

    messages: int
    bytes: int


class Limits(NamedTuple):
    """What a communicator allows.

    Attributes:
        size: peers are ``0 <= peer < size``.
        tag_bound: tags are ``0 <= tag < tag_bound``.
        world: the world's rank of every peer.
    """

    size: int
    tag_bound: int
    world: Sequence[int]


def starter(
    mpi: Any, start: Callable[..., Any], limits: Limits, what: str, bells: Doorbells | None = None
) -> tuple[Starter, Callable[[], Count]]:
    """Make the function that starts messages.

    Args:
        mpi: the module ``mpi4py.MPI``.
        start: a communicator's ``Isend``, ``Issend`` or ``Irecv``.
        limits: what the communicator allows.
        what: ``"dest"`` or ``"source"``, for error messages.
        bells: to wake the other rank, if it is on this machine and sleeps.

    Returns:
        The starter, which raises `MessageError` before anything is sent and `TransportError` when MPI fails, and a
        function that tells its count.
    """
    from_address, byte, new, lazy = mpi.buffer.fromaddress, mpi.BYTE, MpiRequest, _LAZY.get
    size, tag_bound, world = limits
    accelerated = torch.version.cuda is not None or torch.version.hip is not None
    mpi_error: type[Exception] = mpi.Exception
    messages = total = 0
    asleep, flags = _flags(bells, world)

    def begin(tensor: torch.Tensor, peer: int, tag: int) -> Request:
        nonlocal messages, total
        try:
            nbytes = tensor.nbytes
            if not (0 <= peer < size and 0 <= tag < tag_bound and tensor.is_contiguous()):
                raise refusal(tensor, peer, tag, limits, what)
            if nbytes <= lazy(tensor.dtype, -1) or (accelerated and not tensor.is_cpu):
                check_memory(tensor)
            message = from_address(tensor.data_ptr(), nbytes), nbytes, byte
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise refusal(tensor, peer, tag, limits, what) from error
        request = new()
        try:
            request.test = start(message, peer, tag).Test
        except mpi_error as error:
            raise TransportError(f"MPI cannot start a message, {what} = {peer}, tag = {tag}: {error}") from error
        request.tensor = tensor
        request.peer = world[peer]
        messages += 1
        total += nbytes
        if asleep[flags[peer]]:
            bells.ring(flags[peer])  # type: ignore[union-attr]
        return request

    return begin, lambda: Count(messages, total)


def _flags(bells: Doorbells | None, world: Sequence[int]) -> tuple[Sequence[int], list[int]]:
    """Words that are not 0 while a rank sleeps, and where in them each peer's is."""
    if bells is None:
        return [0], [0] * len(world)
    return bells.asleep, [bells.flag(rank) for rank in world]


def check_memory(tensor: torch.Tensor) -> None:
    """Refuse what MPI cannot read or write in place.

    Raises:
        MessageError: no dense memory of the CPU that holds the values as they are.
    """
    check_dense(tensor)
    if not tensor.is_cpu:
        raise MessageError(f"the message is on {tensor.device} but MPI moves CPU memory; send tensor.cpu()")


def refusal(tensor: torch.Tensor, peer: int, tag: int, limits: Limits, what: str) -> CommError:
    """Why a message cannot be started."""
    try:
        check_memory(tensor)
        check_peer(peer, limits.size, what)
        check_tag(tag, limits.tag_bound)
    except CommError as error:
        return error
    return MessageError(f"the message {tensor.dtype}{list(tensor.shape)} has no memory of its own")


class Messages:
    """A communicator's messages, for collectives: a `pipert.comm.collectives.Channel`."""

    def __init__(self, mpi: Any, comm: Any, limits: Limits, bells: Doorbells | None) -> None:
        self.rank: int = comm.Get_rank()
        self.size: int = limits.size
        self._isend, _ = starter(mpi, comm.Isend, limits, "dest", bells)
        self._irecv, _ = starter(mpi, comm.Irecv, limits, "source", bells)

    def isend(self, tensor: torch.Tensor, dest: int, tag: int, /) -> Request:
        """Start sending."""
        return self._isend(tensor, dest, tag)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int, /) -> Request:
        """Start receiving."""
        return self._irecv(tensor, source, tag)
