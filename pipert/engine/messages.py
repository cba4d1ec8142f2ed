"""Tensors as messages: several small ones travel packed in one, large ones travel from and into their own memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import prod

import torch

from pipert.comm.transport import Request, Transport
from pipert.engine.boundary import BoundarySpec, LeafSpec, room
from pipert.errors import BoundaryError

#: Tensors up to this size are packed with others. Copying 32 KiB takes about as long as starting one more message.
PACK_BYTES = 32 * 1024
_ALIGN = 16
#: Sizes travel in one message of this length, and a second one where they are longer.
META_BYTES = 1024
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Piece:
    """One message.

    Attributes:
        indices: the tensors in it.
        offsets: where each begins, in bytes, when there are several.
        nbytes: the message's length when there are several.
        on_host: whether the tensors live in the CPU's memory.
    """

    indices: tuple[int, ...]
    offsets: tuple[int, ...] = (0,)
    nbytes: int = 0
    on_host: bool = True


def nbytes(spec: LeafSpec) -> int:
    """Size of a tensor in bytes."""
    return prod(spec.shape) * spec.torch_dtype.itemsize


@lru_cache(maxsize=4096)
def pieces(specs: tuple[LeafSpec, ...]) -> tuple[Piece, ...]:
    """How tensors are spread over messages: the same on both ends. Empty tensors need no message."""
    sizes = {i: nbytes(spec) for i, spec in enumerate(specs) if nbytes(spec)}
    result = [Piece((i,), on_host=specs[i].on_host) for i, size in sizes.items() if size > PACK_BYTES]
    for on_host in (False, True):
        small = [i for i, size in sizes.items() if size <= PACK_BYTES and specs[i].on_host == on_host]
        ends = list(accumulate(-(-sizes[i] // _ALIGN) * _ALIGN for i in small))
        if small:
            result.append(Piece(tuple(small), (0, *ends[:-1]), ends[-1], on_host))
    return tuple(result)


class Outgoing:
    """A hand-over on its way out. It keeps the memory alive until the messages are complete, and watches it.

    Attributes:
        doing: what it is, in schedule words.
        peer: the rank it goes to.
        requests: the messages not known to be complete.
    """

    __slots__ = ("_memory", "_versions", "doing", "peer", "requests")

    def __init__(self, doing: object, peer: int) -> None:
        """An empty one; `send` fills it."""
        self.doing = doing
        self.peer = peer
        self.requests: list[Request] = []
        self._memory: list[torch.Tensor] = []
        self._versions: list[int] = []

    def send(self, transport: Transport, tensor: torch.Tensor, tag: int) -> None:
        """Start one more message."""
        self._memory.append(tensor)
        self._versions.append(tensor._version)
        self.requests.append(transport.isend(tensor, self.peer, tag))

    def done(self) -> bool:
        """Whether all messages are complete; never blocks."""
        return all(request.test() for request in self.requests)

    def check(self) -> None:
        """After completion: nobody has changed the memory meanwhile.

        Raises:
            BoundaryError: a module changed it in place.
        """
        for tensor, version in zip(self._memory, self._versions, strict=True):
            if tensor._version != version:
                raise BoundaryError(
                    f"{self.doing}: a tensor was changed in place while it was being sent, so the receiver may "
                    "have got either value; let the block return a clone of what it keeps and changes later"
                )


def send_tensors(
    transport: Transport, tensors: Sequence[torch.Tensor], specs: tuple[LeafSpec, ...], tag: int, outgoing: Outgoing
) -> None:
    """Start sending tensors. All messages bear one tag: messages of one tag between two ranks stay in order."""
    for piece in pieces(specs):
        if len(piece.indices) == 1:
            outgoing.send(transport, dense(tensors[piece.indices[0]]), tag)
        else:
            outgoing.send(transport, _pack([tensors[i] for i in piece.indices], piece), tag)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where its memory holds its values in order, else a copy."""
    if tensor.is_complex() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous()


def _pack(tensors: Sequence[torch.Tensor], piece: Piece) -> torch.Tensor:
    buffer = torch.empty(piece.nbytes, dtype=torch.uint8, device=tensors[0].device)
    for tensor, offset in zip(tensors, piece.offsets, strict=True):
        _part(buffer, offset, tensor.shape, tensor.dtype).copy_(tensor)
    return buffer


def _part(buffer: torch.Tensor, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in a piece of the buffer's memory. It is no view: blocks may change it in place like any other."""
    strides = list(accumulate(reversed(shape[1:]), lambda stride, size: stride * size, initial=1))[::-1]
    tensor = torch.empty(0, dtype=dtype, device=buffer.device)
    return tensor.set_(
        buffer.untyped_storage(), offset // dtype.itemsize, shape, strides[-len(shape) :] if shape else ()
    )


class Incoming:
    """Tensors on their way in.

    Attributes:
        tensors: where they arrive; not to be read before `requests` are complete.
        requests: the messages.
    """

    __slots__ = ("requests", "tensors")

    def __init__(self, tensors: list[torch.Tensor], requests: list[Request]) -> None:
        """Posted by `receive_tensors`."""
        self.tensors = tensors
        self.requests = requests


def receive_tensors(
    transport: Transport, specs: tuple[LeafSpec, ...], device: torch.device, source: int, tag: int
) -> Incoming:
    """Make room for tensors and start receiving into it."""
    tensors: list[torch.Tensor | None] = [None] * len(specs)
    requests = []
    for piece in pieces(specs):
        if len(piece.indices) == 1:
            index = piece.indices[0]
            memory = tensors[index] = room(specs[index], device)
        else:
            memory = torch.empty(piece.nbytes, dtype=torch.uint8, device="cpu" if piece.on_host else device)
            for index, offset in zip(piece.indices, piece.offsets, strict=True):
                tensors[index] = _part(memory, offset, specs[index].shape, specs[index].torch_dtype)
        requests.append(transport.irecv(memory, source, tag))
    return Incoming(
        [room(specs[i], device) if tensor is None else tensor for i, tensor in enumerate(tensors)], requests
    )


def send_spec(transport: Transport, spec: BoundarySpec, tag: int, outgoing: Outgoing) -> None:
    """Start sending a specification."""
    data = spec.encode()
    first = META_BYTES - _LENGTH_BYTES
    head = len(data).to_bytes(_LENGTH_BYTES, "little") + data[:first].ljust(first)
    outgoing.send(transport.control, _bytes(head), tag)
    if len(data) > first:
        outgoing.send(transport.control, _bytes(data[first:]), tag)


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def receive_spec(transport: Transport, source: int, tag: int) -> Incoming:
    """Start receiving a specification; `finish_spec` reads it."""
    head = torch.empty(META_BYTES, dtype=torch.uint8)
    return Incoming([head], [transport.control.irecv(head, source, tag)])


def finish_spec(transport: Transport, incoming: Incoming, doing: object, source: int, tag: int) -> BoundarySpec:
    """Wait for a specification."""
    transport.wait(incoming.requests[0], doing, source)
    head = incoming.tensors[0].numpy().tobytes()
    length = int.from_bytes(head[:_LENGTH_BYTES], "little")
    data = head[_LENGTH_BYTES : _LENGTH_BYTES + length]
    if length > len(data):
        rest = torch.empty(length - len(data), dtype=torch.uint8)
        transport.wait(transport.control.irecv(rest, source, tag), doing, source)
        data += rest.numpy().tobytes()
    return BoundarySpec.decode(data)
