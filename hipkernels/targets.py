"""What the kernels can be compiled for, and with which compiler and flags."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipert.hipkernels.errors import KernelTargetError

#: Flags of every mode. -ffast-math is never among them: it flushes subnormals to zero in the whole process.
COMMON = ("-std=c++17", "-O3", "-fPIC", "-Wall", "-Wextra")
#: Keep IEEE arithmetic, but let loops with sqrt, rint and comparisons become vector loops.
HOST = ("-x", "c++", "-march=native", "-mprefer-vector-width=512", "-fno-math-errno", "-fno-trapping-math", "-fopenmp")
#: Where Debian's ROCm device libraries are.
DEBIAN_DEVICE_LIBRARIES = Path("/usr/lib/x86_64-linux-gnu/amdgcn/bitcode")


@dataclass(frozen=True)
class Target:
    """A library to build.

    Attributes:
        name: ``host``, ``emulated``, or GPU architectures of one vendor, joined by commas.
        compiler: path of the compiler.
        compile: flags that turn one source into an object file.
        linker: path of the compiler that links.
        link: its flags that turn the objects into a library.
        environment: variables the compiler needs, as ``NAME=value``.
        device_libraries: AMD device libraries that the compiler misses, and what stands in: ``(name, path)``.
    """

    name: str
    compiler: str
    compile: tuple[str, ...]
    linker: str
    link: tuple[str, ...] = ("-shared",)
    environment: tuple[str, ...] = ()
    device_libraries: tuple[tuple[str, str], ...] = ()


def find_target(name: str, environment: Mapping[str, str] | None = None) -> Target:
    """The target of this name, with the compiler that this machine has for it.

    Args:
        name: ``host`` (this CPU), ``emulated`` (a GPU's blocks as fibers on this CPU, for tests), AMD architectures
            such as ``gfx90a,gfx942``, or NVIDIA ones such as ``sm_80,sm_90``.
        environment: where ``CXX``, ``HIPCC``, ``NVCC`` and ``ROCM_PATH`` are looked up; default ``os.environ``.

    Raises:
        KernelTargetError: no such target, or no compiler for it.
    """
    variables = os.environ if environment is None else environment
    architectures = name.split(",")
    if name == "host":
        return _host(name, variables)
    if name == "emulated":
        return _emulated(variables)
    if all(re.fullmatch(r"gfx[0-9a-f]{3,4}", one) for one in architectures):
        return _amd(name, architectures, variables)
    if all(re.fullmatch(r"sm_[0-9]{2,3}a?", one) for one in architectures):
        return _nvidia(name, architectures, variables)
    raise KernelTargetError(
        f"kernel target {name!r} is none of: host, emulated, AMD architectures (gfx90a,gfx942), "
        "NVIDIA architectures (sm_80,sm_90); one vendor at a time"
    )


def _compiler(names: Sequence[str], name: str, variable: str) -> str:
    """Path of the first of these compilers there is."""
    for candidate in names:
        path = shutil.which(candidate) if candidate else None
        if path:
            return path
    tried = ", ".join(filter(None, names))
    raise KernelTargetError(f"no compiler for kernels on {name!r}: looked for {tried}; install one or set {variable}")


def _host(name: str, variables: Mapping[str, str]) -> Target:
    compiler = _compiler([variables.get("CXX", ""), "g++", "c++"], name, "CXX")
    # Not linked with an OpenMP library: torch has brought its own, and a second one would have a second set of threads.
    return Target(name, compiler, (*HOST, *COMMON, "-DPORT_CPU"), compiler)


def _emulated(variables: Mapping[str, str]) -> Target:
    compiler = _compiler([variables.get("CXX", ""), "g++", "c++"], "emulated", "CXX")
    flags = tuple(flag for flag in COMMON if flag != "-O3")
    # -fno-gnu-unique: or all emulated libraries of a process would share one emulator.
    return Target("emulated", compiler, ("-x", "c++", *flags, "-O1", "-fno-gnu-unique", "-DPORT_EMULATED"), compiler)


def _nvidia(name: str, architectures: list[str], variables: Mapping[str, str]) -> Target:
    compiler = _compiler([variables.get("NVCC", ""), "nvcc", "/usr/local/cuda/bin/nvcc"], name, "NVCC")
    flags = ["-x", "cu", "-std=c++17", "-O3", "-Xcompiler", "-fPIC,-Wall,-Wextra"]
    for one in architectures:
        number = one.removeprefix("sm_")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
    return Target(name, compiler, tuple(flags), compiler)


def _amd(name: str, architectures: list[str], variables: Mapping[str, str]) -> Target:
    """A site's ROCm if there is one, else a plain clang with HIP's headers, else Debian's hipcc for what it knows.

    Debian's hipcc 5.2 comes last: its clang 15 takes many minutes for dropout's random numbers, newer ones seconds.
    """
    rocm = variables.get("ROCM_PATH", "/opt/rocm")
    offload = tuple(f"--offload-arch={one}" for one in architectures)
    # The host's compiler links, without a HIP runtime: torch's ROCm build has brought its own, which must stay alone.
    linker = _compiler([variables.get("CXX", ""), "g++", "c++"], name, "CXX")
    source = ("-x", "hip", *COMMON, *offload)
    environment = ("HIP_PLATFORM=amd",)
    for candidate in (variables.get("HIPCC", ""), f"{rocm}/bin/hipcc"):
        path = shutil.which(candidate) if candidate else None
        if path:
            return Target(name, path, source, linker, environment=environment)
    newest = next((path for version in (21, 20, 19) if (path := _clang_with_lld(version))), "")
    compiler = _compiler([newest, "hipcc"], name, "HIPCC")
    if Path(compiler).name == "hipcc":
        if not _debian_knows(architectures):
            raise KernelTargetError(
                f"{compiler} does not know all of {name}; install clang-19 and lld-19, or a newer ROCm"
            )
        return Target(name, compiler, source, linker, environment=environment)
    flags = (*source, "--rocm-path=/usr")
    return Target(name, compiler, flags, linker, environment=environment, device_libraries=_aliases(architectures))


def _clang_with_lld(version: int) -> str:
    """Path of this clang if it finds an lld of its version, which links the device's code; else nothing."""
    path = shutil.which(f"clang++-{version}")
    return path if path is not None and (Path(path).resolve().parent / "lld").exists() else ""


def _debian_knows(architectures: list[str]) -> bool:
    """Whether Debian's hipcc 5.2 knows these: those that it has device libraries for (and 940 is not 942)."""
    return all((DEBIAN_DEVICE_LIBRARIES / f"oclc_isa_version_{one[3:]}.bc").exists() for one in architectures)


def _aliases(architectures: list[str]) -> tuple[tuple[str, str], ...]:
    """Device libraries of newer chips of a family that there are older ones of: they only name the chip."""
    aliases = []
    for one in architectures:
        wanted, older = f"oclc_isa_version_{one[3:]}.bc", DEBIAN_DEVICE_LIBRARIES / f"oclc_isa_version_{one[3:-1]}0.bc"
        if not (DEBIAN_DEVICE_LIBRARIES / wanted).exists() and older.exists():
            aliases.append((wanted, str(older)))
    return tuple(aliases)


def device_library_flags(target: Target, folder: str) -> tuple[str, ...]:
    """Make a folder of the device libraries with the target's aliases inside ``folder``; the flag that names it."""
    if not target.device_libraries:
        return ()
    libraries = Path(tempfile.mkdtemp(prefix="bitcode-", dir=folder))
    for path in DEBIAN_DEVICE_LIBRARIES.glob("*.bc"):
        (libraries / path.name).symlink_to(path)
    for wanted, existing in target.device_libraries:
        (libraries / wanted).symlink_to(existing)
    return (f"--rocm-device-lib-path={libraries}",)
