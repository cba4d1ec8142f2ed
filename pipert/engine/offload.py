"""Activations in host memory between a micro-batch's forward and its backward.

While a micro-batch runs forward, autograd gives what it saves to `Saved`, which keeps whole pieces of memory, each once
however many saved tensors look into it. OFFLOAD copies the pieces to host memory (pinned, on a stream of its own, where
the stage computes on a GPU) and lets go of them; RELOAD copies them back. Parameters and buffers stay where they are.
Numbers and strides come back bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks


class _Piece:
    """A piece of memory, as bytes: on the device, or on the host."""

    __slots__ = ("data", "host")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.data: torch.Tensor | None = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self.host: torch.Tensor | None = None


class _View(NamedTuple):
    """A saved tensor: how to see it in its piece."""

    piece: _Piece
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class Saved:
    """What autograd saves of one micro-batch on one stage.

    Args:
        mover: copies it.
        fixed: addresses of memory that is not moved: that of parameters and buffers.
    """

    def __init__(self, mover: Mover, fixed: Collection[int]) -> None:
        self._mover, self._fixed = mover, fixed
        self._pieces: dict[int, _Piece] = {}
        self._versions: list[tuple[torch.Tensor, int]] = []

    def saving(self) -> AbstractContextManager[Any]:
        """Within it autograd saves here."""
        return saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _View:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self._fixed or not tensor.numel() or tensor.device != self._mover.device:
            return tensor
        self._versions.append((tensor.detach(), tensor._version))
        piece = self._pieces.setdefault(address, _Piece(storage))
        return _View(piece, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())

    def offload(self) -> None:
        """OFFLOAD.

        Raises:
            RuntimeError: a block changed in place what its backward needs; autograd would have said so in the backward.
        """
        for tensor, version in self._versions:
            if tensor._version != version:
                raise RuntimeError(
                    f"a tensor of shape {list(tensor.shape)} that is needed for the backward has been changed in "
                    f"place: it is at version {tensor._version}, and was saved at version {version}"
                )
        self._versions.clear()
        self._mover.out(list(self._pieces.values()))

    def reload(self) -> None:
        """RELOAD. Afterwards only the graph keeps the pieces, so that its backward frees one after the other."""
        pieces = list(self._pieces.values())
        self._pieces.clear()
        self._mover.back(pieces)


def _unpack(saved: torch.Tensor | _View) -> torch.Tensor:
    if not isinstance(saved, _View):
        return saved
    data = saved.piece.data
    assert data is not None, "a backward before its RELOAD"
    view = torch.empty(0, dtype=saved.dtype, device=data.device)
    return view.set_(data.untyped_storage(), saved.offset, saved.shape, saved.stride)


class Mover:
    """Copies pieces of memory between a device and the host.

    On a GPU the copies of each direction run on a stream of their own, beside the computations; `wait` lets the
    computations that come wait for what is on its way back. Where stages compute on the CPU, the host's copy is a copy
    in the same memory, made at once: it saves nothing, but everything happens as it would.

    Args:
        device: where the stages compute.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: Any = None
        if device.type != "cpu":
            module = torch.get_device_module(device)
            self._streams = [module.Stream(device) for _ in range(2)]

    def out(self, pieces: list[_Piece]) -> None:
        """Copy to the host, and let go of the device's memory."""
        if self._streams is None:
            for piece in pieces:
                assert piece.data is not None
                piece.host, piece.data = piece.data.clone(), None
            return
        module, stream = torch.get_device_module(self.device), self._streams[0]
        stream.wait_stream(module.current_stream(self.device))
        with module.stream(stream):
            for piece in pieces:
                assert piece.data is not None
                piece.host = torch.empty(piece.data.numel(), dtype=torch.uint8, pin_memory=True)
                piece.host.copy_(piece.data, non_blocking=True)
                piece.data.record_stream(stream)  # its memory is used again only when the copy is made
                piece.data = None

    def back(self, pieces: list[_Piece]) -> None:
        """Copy back to the device."""
        if self._streams is None:
            for piece in pieces:
                assert piece.host is not None
                piece.data, piece.host = piece.host.clone(), None
            return
        module, (leaving, stream) = torch.get_device_module(self.device), self._streams
        stream.wait_stream(leaving)
        with module.stream(stream):
            for piece in pieces:
                assert piece.host is not None
                piece.data = torch.empty(piece.host.numel(), dtype=torch.uint8, device=self.device)
                piece.data.copy_(piece.host, non_blocking=True)
                piece.data.record_stream(module.current_stream(self.device))
                piece.host = None

    def wait(self) -> None:
        """Before a backward: what has been asked back is there."""
        if self._streams is not None:
            torch.get_device_module(self.device).current_stream(self.device).wait_stream(self._streams[1])
