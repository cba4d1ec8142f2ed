"""Find, load and call the kernels' library.

The environment variable ``PIPERT_KERNELS`` chooses: ``auto`` (default) uses the kernels where there are any and torch
where there are none, saying so in one line; ``reference`` always uses torch; ``required`` raises instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import re
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipert.hipkernels.build import SOURCES, build
from pipert.hipkernels.errors import KernelBuildError, KernelError, KernelInputError, KernelLaunchError
from pipert.hipkernels.targets import find_target

logger = logging.getLogger(__name__)

MODES = ("auto", "reference", "required")
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
#: Elements from which on work is shared out among CPU threads; torch's own limit.
LEAST_SHARED = 1 << 15
_REASONS = {
    1: "a dtype that this kernel does not take",
    2: "an impossible size",
    3: "rows too long for the threads of one block",
}


@dataclass(frozen=True)
class Address:
    """A tensor whose strides the kernel is told: it need not be contiguous."""

    tensor: torch.Tensor


class Library:
    """The C functions of one compiled library.

    Args:
        path: the library.
        device: the kind of device that its pointers are of, ``cpu`` or ``cuda``.

    Raises:
        KernelBuildError: it cannot be loaded, or is of another version than these Python files.
    """

    def __init__(self, path: Path, device: str) -> None:
        import cffi

        self.path = path
        self.device = device
        self._ffi = cffi.FFI()
        header = (SOURCES / "kernels.h").read_text()
        self._ffi.cdef(header)
        _share_runtime(device)
        try:
            self._functions: Any = self._ffi.dlopen(str(path))
        except OSError as error:
            raise KernelBuildError(f"the kernels' library {path} cannot be loaded: {error}") from error
        if self._functions.pipert_abi() != self._functions.PIPERT_KERNELS_ABI:
            raise KernelBuildError(f"{path} was built from other sources; delete it")
        #: Columns of the longest rows whose columns can be summed; 0: no limit.
        self.widest = int(self._functions.pipert_widest())

    def run(self, name: str, *arguments: torch.Tensor | Address | float | None, work: int = 0) -> None:
        """Call ``pipert_<name>`` with these arguments and the stream of their device.

        Args:
            name: of the function.
            arguments: its arguments but for the stream.
            work: elements it has to do with, if more than any argument has.

        Raises:
            KernelInputError: a tensor is on another device than the others, or not contiguous.
            KernelLaunchError: the launcher returned a code.
        """
        tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
        device = tensors[0].device
        converted = [self._convert(name, argument, device) for argument in arguments]
        function = getattr(self._functions, f"pipert_{name}")
        if self.device == "cpu":
            worth = max(work, *(tensor.numel() for tensor in tensors)) >= LEAST_SHARED
            code = function(*converted, self._ffi.cast("void *", torch.get_num_threads() if worth else 1))
        else:
            with torch.cuda.device(device):
                stream = torch.cuda.current_stream(device).cuda_stream
                code = function(*converted, self._ffi.cast("void *", stream))
        if code:
            raise KernelLaunchError(f"kernel {name} returned {code}: {self._explain(code)}")

    def emulate(self, wave: int, threads: int = 0, order: int = 0, seed: int = 1) -> None:
        """Steer the emulator (``emulated`` libraries): see ``pipert_emulate`` in ``csrc/kernels.h``."""
        if self._functions.pipert_emulate(wave, threads, order, seed):
            raise KernelInputError(f"no emulation with waves of {wave}, {threads} threads, order {order}")

    def _convert(self, name: str, argument: Any, device: torch.device) -> Any:
        if argument is None:
            return self._ffi.NULL
        strided = isinstance(argument, Address)
        tensor = argument.tensor if strided else argument
        if not isinstance(tensor, torch.Tensor):
            return argument
        if tensor.device != device or device.type != self.device:
            raise KernelInputError(f"kernel {name}: a tensor on {tensor.device} among others on {device} ({self.path})")
        if not strided and not tensor.is_contiguous():
            raise KernelInputError(f"kernel {name}: strides {tensor.stride()} of a tensor that must be contiguous")
        return self._ffi.cast("void *", tensor.data_ptr())

    def _explain(self, code: int) -> str:
        if code == 90:
            return str(self._ffi.string(self._functions.pipert_fault()).decode())
        return _REASONS.get(code, f"error {code - 100} of the device's runtime")


def library_that_sums(columns: int, *tensors: torch.Tensor | None) -> Library | None:
    """`library_for`, unless its threads cannot own that many columns between them."""
    library = library_for(*tensors)
    return library if library is None or not library.widest or columns <= library.widest else None


def mode() -> str:
    """What ``PIPERT_KERNELS`` says.

    Raises:
        KernelInputError: it says something else than `MODES`.
    """
    value = os.environ.get("PIPERT_KERNELS") or "auto"
    if value not in MODES:
        raise KernelInputError(f"PIPERT_KERNELS={value!r} is none of {', '.join(MODES)}")
    return value


_CHOSEN: ContextVar[Library | None] = ContextVar("pipert_kernels_library", default=None)


@contextlib.contextmanager
def use(library: Library) -> Iterator[Library]:
    """Use this library for its kind of device, whatever the environment says; for tests."""
    token = _CHOSEN.set(library)
    try:
        yield library
    finally:
        _CHOSEN.reset(token)


def library_for(*tensors: torch.Tensor | None) -> Library | None:
    """The library for tensors of this device and these dtypes; none: use the torch reference.

    Kernels take fp32, bf16 and fp16 on CPUs and on AMD and NVIDIA GPUs; anything else is the reference's.

    Raises:
        KernelBuildError: there is no library and ``PIPERT_KERNELS=required``.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    device = given[0].device
    if device.type not in ("cpu", "cuda") or any(tensor.dtype not in DTYPES for tensor in given):
        return None
    chosen = _CHOSEN.get()
    if chosen is not None and chosen.device == device.type:
        return chosen
    wanted = mode()
    if wanted == "reference":
        return None
    found = _load("host" if device.type == "cpu" else _architecture(device.index))
    if isinstance(found, Library):
        return found
    if wanted == "required":
        raise KernelBuildError(f"PIPERT_KERNELS=required, but there are no kernels: {found}")
    return None


@functools.cache
def _load(target: str) -> Library | str:
    """The library of a target, or why there is none; said once."""
    try:
        path = build(find_target(target))
        return Library(path, "cpu" if target == "host" else "cuda")
    except KernelError as error:
        logger.warning("no kernels for %s, using torch instead: %s", target, str(error).splitlines()[0])
        return str(error)


@functools.cache
def _architecture(index: int | None) -> str:
    """The target of a GPU: ``gfx90a`` or ``sm_90``."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def _share_runtime(device: str) -> None:
    """Make torch's OpenMP or HIP library visible to ours, so that there is one of each in the process."""
    if device == "cuda" and not torch.version.hip:
        return  # our library brings CUDA's runtime along, which works beside torch's
    wanted, symbol = ("libgomp", "GOMP_parallel") if device == "cpu" else ("libamdhip64", "hipLaunchKernel")
    if hasattr(ctypes.CDLL(None), symbol):
        return
    mapped = sorted(set(re.findall(rf"/\S*{wanted}\S*", Path("/proc/self/maps").read_text())))
    try:
        ctypes.CDLL(mapped[0] if mapped else f"{wanted}.so" + (".1" if device == "cpu" else ""), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise KernelBuildError(f"the kernels need {wanted}, which cannot be loaded: {error}") from error
