"""Find, load and call the kernels' library.

The environment variable ``PIPERT_KERNELS`` chooses: ``auto`` (default) uses the kernels where there are any and torch
where there are none, which the first rank of a job says in one line; ``reference`` always uses torch; ``required``
raises instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import re
import threading
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
#: Where launchers (MPICH, Open MPI, PMIx, Slurm, torchrun) tell a process its rank.
_RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID", "RANK")
_NUMBERS = frozenset({int, float, bool})
_REASONS = {
    1: "a dtype that this kernel does not take",
    2: "an impossible size",
    3: "rows too long for the threads of one block",
    4: "no memory",
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
        self._entries: dict[str, Any] = {}
        _share_runtime(device)
        try:
            self._functions: Any = self._ffi.dlopen(str(path))
        except OSError as error:
            raise KernelBuildError(
                f"the kernels' library {path} cannot be loaded: {error}; delete it to have it built again"
            ) from error
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
            KernelInputError: a tensor is on another device than the others, not contiguous, or without memory.
            KernelLaunchError: the launcher returned a code.
        """
        device, elements, converted = self._convert(name, arguments)
        function = self._entries.get(name) or self._enter(name)
        if self.device == "cpu":
            code = function(*converted, torch.get_num_threads() if max(work, elements) >= LEAST_SHARED else 1)
        else:
            with torch.cuda.device(device):
                code = function(*converted, torch.cuda.current_stream(device).cuda_stream)
        if code:
            raise KernelLaunchError(f"kernel {name} returned {code}: {self._explain(code)}")

    def _enter(self, name: str) -> Any:
        """``pipert_<name>``, with addresses as plain numbers: cffi's pointers would cost more than small kernels."""
        function = getattr(self._functions, f"pipert_{name}")
        kinds = ["uintptr_t" if a.kind == "pointer" else a.cname for a in self._ffi.typeof(function).args]
        entry = self._ffi.cast(f"int(*)({', '.join(kinds)})", function)
        return self._entries.setdefault(name, entry)

    def emulate(self, wave: int, threads: int = 0, order: int = 0, seed: int = 1) -> None:
        """Steer the emulator (``emulated`` libraries): see ``pipert_emulate`` in ``csrc/kernels.h``."""
        if self._functions.pipert_emulate(wave, threads, order, seed):
            raise KernelInputError(f"no emulation with waves of {wave}, {threads} threads, order {order}")

    def _convert(self, name: str, arguments: tuple[Any, ...]) -> tuple[torch.device, int, list[Any]]:
        """The tensors' device, the elements of the largest, and the arguments as C takes them."""
        device: torch.device | None = None
        elements = 0
        converted: list[Any] = []
        for argument in arguments:
            kind = type(argument)
            if kind in _NUMBERS:
                converted.append(argument)
                continue
            if argument is None:
                converted.append(0)
                continue
            tensor = argument.tensor if kind is Address else argument
            device = device or tensor.device
            if tensor.device != device or device.type != self.device:
                raise KernelInputError(
                    f"kernel {name}: a tensor on {tensor.device} among others on {device} ({self.path})"
                )
            if kind is not Address:
                elements = max(elements, tensor.numel())
                if not tensor.is_contiguous():
                    raise KernelInputError(
                        f"kernel {name}: strides {tensor.stride()} of a tensor that must be contiguous"
                    )
            converted.append(pointer_of(name, tensor))
        assert device is not None
        return device, elements, converted

    def _explain(self, code: int) -> str:
        if code == 90:
            return str(self._ffi.string(self._functions.pipert_fault()).decode())
        return _REASONS.get(code, f"error {code - 100} of the device's runtime")


def pointer_of(name: str, tensor: torch.Tensor) -> int:
    """Address of a tensor's first element, for kernel ``name``.

    Raises:
        KernelInputError: it has no memory (a fake tensor, or one whose storage was freed), or its memory holds the
            negative of what it stands for.
    """
    address = tensor.data_ptr()
    if not address and tensor.numel():
        raise KernelInputError(f"kernel {name}: a tensor of shape {tuple(tensor.shape)} has no memory; was it freed?")
    if tensor.is_neg():
        raise KernelInputError(f"kernel {name}: a negative view; call resolve_neg() on it")
    return address


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


_LOADING = threading.Lock()
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
    if any(tensor.dtype not in DTYPES for tensor in given):
        return None
    return library_on(given[0].device, given[0].dtype)


def library_on(device: torch.device, dtype: torch.dtype) -> Library | None:
    """The library for tensors of this dtype on this device; see `library_for`."""
    if device.type not in ("cpu", "cuda") or dtype not in DTYPES:
        return None
    chosen = _CHOSEN.get()
    if chosen is not None and chosen.device == device.type:
        return chosen
    wanted = mode()
    if wanted == "reference":
        return None
    target = "host" if device.type == "cpu" else _architecture(device.index)
    with _LOADING:  # ranks may be threads: one of them loads, and says so if it cannot
        found = _load(target)
    if isinstance(found, Library):
        return found
    if wanted == "required":
        raise KernelBuildError(f"PIPERT_KERNELS=required, but there are no kernels: {found}")
    return None


def usable(*tensors: object) -> bool:
    """Whether layers should call the kernels on these, rather than torch's own functions.

    They should not where there is no library for them, nor where torch's functions do what kernels do not: symbolic
    tracing by torch.fx, autocast, forward-mode derivatives and torch.func. Under ``torch.compile`` the answer becomes
    part of the compiled code. The first call builds the library; `prepare` does so ahead of time.
    """
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or torch.is_autocast_enabled(tensor.device.type):
            return False
        if not _usable(str(tensor.device), tensor.dtype):
            return False
    return torch.compiler.is_compiling() or not (
        torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _usable(device: str, dtype: torch.dtype) -> bool:
    return library_on(torch.device(device), dtype) is not None


def prepare(device: torch.device) -> str:
    """Build and load the library for a device, if there is to be one, so that no later call waits for a compiler.

    Returns:
        ``kernels`` or ``reference``: what operations on this device will use.

    Raises:
        KernelBuildError: there is no library and ``PIPERT_KERNELS=required``.
    """
    return "reference" if library_on(device, torch.float32) is None else "kernels"


@functools.cache
def _load(target: str) -> Library | str:
    """The library of a target, or why there is none; said once."""
    try:
        path = build(find_target(target))
        return Library(path, "cpu" if target == "host" else "cuda")
    except KernelError as error:
        level = logging.WARNING if _is_first_rank() else logging.INFO
        logger.log(level, "no kernels for %s, using torch instead: %s", target, str(error).splitlines()[0])
        return str(error)


def _is_first_rank() -> bool:
    """Whether this process speaks for its job, as far as the launcher has said which one it is."""
    return next((value for name in _RANKS if (value := os.environ.get(name))), "0") == "0"


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
