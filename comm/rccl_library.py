"""RCCL's or NCCL's library: found by name, loaded and called through cffi, its results turned into errors."""

from __future__ import annotations

import ctypes.util
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipert.comm.errors import TransportError

#: The C prototypes: the only text that cffi reads.
HEADER = Path(__file__).resolve().with_name("rccl.h")
#: ``ncclCommSplit`` came with this version (ROCm 6.0 has it).
OLDEST = (2, 18, 0)
#: Names that the loader looks for, in this order.
NAMES = ("librccl.so.1", "librccl.so", "libnccl.so.2", "libnccl.so")
_MAPPED = re.compile(r"\s(/\S*/lib[rn]ccl\.so[.\d]*)$", re.MULTILINE)

_REMEDIES = {
    "ncclUnhandledCudaError": "check that this rank sees its GPU and has called torch.cuda.set_device",
    "ncclSystemError": "NCCL_DEBUG=INFO tells which call failed; check NCCL_SOCKET_IFNAME and the space in /dev/shm",
    "ncclInternalError": "NCCL_DEBUG=INFO tells more; check that all ranks load the same library (pipert doctor)",
    "ncclInvalidArgument": "check that the tensors are on the GPU that was current when the mesh was made",
    "ncclInvalidUsage": "give every rank its own GPU, by torch.cuda.set_device(local rank) before the mesh is made",
    "ncclRemoteError": "another rank or its network has failed; see what that rank has printed",
    "ncclTimeout": "another rank or its network has failed; see what that rank has printed",
}


class RcclError(TransportError):
    """RCCL or NCCL reports an error.

    Attributes:
        result: its name, such as ``ncclSystemError``.
    """

    def __init__(self, message: str, result: str) -> None:
        super().__init__(message)
        self.result = result


def find_library(environ: Mapping[str, str] = os.environ, maps: Path = Path("/proc/self/maps")) -> str:
    """The library to load: what ``PIPERT_RCCL`` names, else the one that torch has mapped, else the loader's.

    torch's own must be used where there is one: two of them in a process would not share their state.

    Args:
        environ: where the variable is looked up.
        maps: what this process has mapped.

    Returns:
        A path, or a name for the loader.

    Raises:
        TransportError: there is none.
    """
    if given := environ.get("PIPERT_RCCL"):
        return given
    mapped = _MAPPED.findall(maps.read_text()) if maps.exists() else []
    if mapped:
        return str(mapped[0])
    for name in NAMES:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name
    raise TransportError(
        f"no RCCL or NCCL library: torch has mapped none, and the loader finds none of {', '.join(NAMES)}; use a torch "
        "built for ROCm or CUDA, or name the library's path in PIPERT_RCCL"
    )


class Library:
    """The C functions of one library, as ``library.call("ncclSend", ...)``.

    Args:
        path: a path, or a name for the loader.

    Attributes:
        path: the same.
        version: of the library, as (major, minor, patch).
        own_streams: the library moves CPU memory on streams of its own: the stand-in of the tests.

    Raises:
        TransportError: it cannot be loaded, lacks a function, or is too old.
    """

    def __init__(self, path: str) -> None:
        import cffi

        self.path = path
        self.ffi = cffi.FFI()
        self.ffi.cdef(HEADER.read_text())
        # Otherwise the first collective of each kind may hold its rank until all others have come to it, which no
        # proof of an order knows about. Read when a communicator is made.
        os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
        try:
            # Never unloaded: it has threads of its own.
            self.functions: Any = self.ffi.dlopen(path, self.ffi.RTLD_NOW | self.ffi.RTLD_NODELETE)
        except OSError as error:
            raise TransportError(
                f"the RCCL library {path} cannot be loaded: {error}; correct or unset PIPERT_RCCL"
            ) from error
        self._places: list[Any] = []
        self.version = self._version()
        if self.version < OLDEST or not self.has("ncclCommSplit"):
            have, need = (".".join(map(str, version)) for version in (self.version, OLDEST))
            raise TransportError(f"{path} is version {have}, pipert needs {need} (ROCm 6.0) or newer")
        self.own_streams = self.has("pipertStreamCreate")

    def _version(self) -> tuple[int, int, int]:
        if not self.has("ncclGetVersion"):
            raise TransportError(f"{self.path} has no ncclGetVersion, so it is neither RCCL nor NCCL; see PIPERT_RCCL")
        number = self.ffi.new("int *")
        self.call("ncclGetVersion", number)
        code = int(number[0])
        return (code // 10000, code // 100 % 100, code % 100) if code >= 10000 else (code // 1000, code // 100 % 10, 0)

    def has(self, name: str) -> bool:
        """Whether the library exports a function."""
        try:
            return getattr(self.functions, name) is not None
        except AttributeError:
            return False

    def __str__(self) -> str:
        name = "RCCL" if "rccl" in Path(self.path).name else "NCCL"
        return f"{name} {'.'.join(map(str, self.version))}: {self.path}"

    def call(self, name: str, *arguments: Any, doing: object = "") -> bool:
        """Call a function that returns an ``ncclResult_t``.

        Args:
            name: of the function.
            arguments: what it takes.
            doing: what for, in an error message.

        Returns:
            False where the work goes on in the background (``ncclInProgress``): see `ready`.

        Raises:
            RcclError: it returned an error.
        """
        result = int(getattr(self.functions, name)(*arguments))
        if result not in (0, int(self.functions.ncclInProgress)):
            raise self.error(result, f"{name}{f', {doing},' if doing else ''}")
        return result == 0

    def ready(self, comm: Any, doing: object = "") -> bool:
        """Whether nothing goes on in the background of a communicator.

        Raises:
            RcclError: something failed there.
        """
        state = self.ffi.new("ncclResult_t *")
        self.call("ncclCommGetAsyncError", comm, state)
        if int(state[0]) not in (0, int(self.functions.ncclInProgress)):
            raise self.error(int(state[0]), str(doing) or "a communicator", comm)
        return int(state[0]) == 0

    def error(self, result: int, what: str, comm: Any = None) -> RcclError:
        """The error for a result."""
        name = self.result_name(result)
        words = self._text(self.functions.ncclGetErrorString(result))
        last = self.ffi.NULL if comm is None else comm
        detail = self._text(self.functions.ncclGetLastError(last)) if self.has("ncclGetLastError") else ""
        detail = " ".join(detail.split())
        remedy = _REMEDIES.get(name, "NCCL_DEBUG=INFO tells more")
        return RcclError(f"{what}: {name}: {words}{f' ({detail})' if detail else ''}; {remedy}", name)

    def result_name(self, result: int) -> str:
        """The name of an ``ncclResult_t``."""
        names: Mapping[int, str] = self.ffi.typeof("ncclResult_t").elements
        return names.get(result, f"ncclResult_t {result}")

    def _text(self, pointer: Any) -> str:
        return "" if pointer == self.ffi.NULL else str(self.ffi.string(pointer).decode(errors="replace"))

    def unique_id(self) -> bytes:
        """An id by which ranks find each other for one new communicator."""
        identity = self.ffi.new("ncclUniqueId *")
        self.call("ncclGetUniqueId", identity)
        return bytes(self.ffi.buffer(identity))

    def init(self, ranks: int, identity: bytes, rank: int) -> Any:
        """Start making a communicator, in the background where the library can; see `ready`.

        Args:
            ranks: how many there will be.
            identity: of `unique_id`, the same on every rank.
            rank: this one.

        Returns:
            Where its handle is or will be.
        """
        result = self._place()
        value = self.ffi.new("ncclUniqueId *")
        self.ffi.buffer(value)[:] = identity
        config = self.ffi.new("ncclConfig_t *")
        config.size = self.ffi.sizeof("ncclConfig_t")
        config.magic = self.functions.NCCL_CONFIG_MAGIC
        config.version = self.functions.NCCL_CONFIG_VERSION
        config.blocking = 0
        self.call(
            "ncclCommInitRankConfig", result, ranks, value[0], rank, config, doing=f"rank {rank} of {ranks} joining"
        )
        return result

    def _place(self) -> Any:
        """For a handle. Never freed: the library writes there in the background, even where making it has failed."""
        self._places.append(self.ffi.new("ncclComm_t *"))
        return self._places[-1]

    def split(self, comm: Any, color: int | None, key: int) -> Any:
        """Start making the part of a communicator with one color; None without one. See `ready`, of both.

        Returns:
            As `init`. NCCL and RCCL write the handle there when the whole communicator is ready again, not before.
        """
        result = self._place()
        number = self.functions.NCCL_SPLIT_NOCOLOR if color is None else color
        self.call("ncclCommSplit", comm, number, key, result, self.ffi.NULL)
        return None if color is None else result
