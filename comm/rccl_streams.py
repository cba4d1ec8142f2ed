"""Streams on which RCCL's operations run: torch's on a GPU, the library's own for the CPU memory of a stand-in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from pipert.comm.errors import TransportError
from pipert.comm.rccl_library import Library


class Stream(Protocol):
    """One queue of operations beside the computations.

    Attributes:
        pointer: what the library takes, as ``void *``.
    """

    pointer: Any

    def follow(self, tensors: Iterable[torch.Tensor]) -> None:
        """What is started next waits for the current stream's work so far; the tensors' memory is kept for it."""
        ...

    def mark(self) -> Callable[[], bool]:
        """Tells, whenever it is called, whether all that was started here before now is over."""
        ...


class DeviceStream:
    """A side stream of a GPU."""

    def __init__(self, library: Library, device: torch.device) -> None:
        self._device = device
        # High priority: a message that waits for a free multiprocessor holds up another rank, not only this one.
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self.pointer = library.ffi.cast("void *", self._stream.cuda_stream)

    def follow(self, tensors: Iterable[torch.Tensor]) -> None:
        """See `Stream`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for tensor in tensors:
            tensor.record_stream(self._stream)

    def mark(self) -> Callable[[], bool]:
        """See `Stream`."""
        query: Callable[[], bool] = self._stream.record_event().query
        return query


class LibraryStream:
    """A stream of the library, which moves CPU memory: whatever the CPU has computed is there already."""

    def __init__(self, library: Library) -> None:
        self._functions = library.functions
        self.pointer = library.functions.pipertStreamCreate()

    def follow(self, tensors: Iterable[torch.Tensor]) -> None:
        """See `Stream`; the requests keep the tensors."""

    def mark(self) -> Callable[[], bool]:
        """See `Stream`."""
        mark = self._functions.pipertStreamMark(self.pointer)
        return lambda: bool(self._functions.pipertStreamReached(self.pointer, mark))


def make_stream(library: Library, device: torch.device) -> Stream:
    """A new stream."""
    return LibraryStream(library) if library.own_streams else DeviceStream(library, device)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """In which the library's functions are called: it works on the current GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def device_of(library: Library) -> torch.device:
    """Where the tensors must be that the library moves: the current GPU.

    Raises:
        TransportError: torch sees no GPU.
    """
    if library.own_streams:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise TransportError(
            f'{library} moves the memory of GPUs, but torch {torch.__version__} sees none; use tensors="mpi", or a '
            "torch built for the GPUs of this machine"
        )
    return torch.device("cuda", torch.cuda.current_device())
