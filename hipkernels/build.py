"""Compile the kernels into one shared library, once a machine.

The library lies in a cache under a name made from everything that can change it: sources, flags, compiler, and for the
host its CPU's features. A build writes beside it and is renamed at the end, so a name that exists is complete. One
process a node builds: the others wait at a file lock, which the operating system opens when its holder ends, however
it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipert.hipkernels.errors import KernelBuildError
from pipert.hipkernels.targets import Target, device_library_flags

SOURCES = Path(__file__).resolve().parent / "csrc"
#: Seconds to wait for another process's build before giving up.
PATIENCE = 900.0


def cache_folder() -> Path:
    """Where libraries are kept: ``PIPERT_CACHE``, or ``pipert`` in the user's cache folder.

    Raises:
        KernelBuildError: the user has no home, as in some containers.
    """
    if chosen := os.environ.get("PIPERT_CACHE"):
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipert"
    except RuntimeError as error:
        raise KernelBuildError(
            f"there is no folder for the kernels: {error}; set PIPERT_CACHE to one that can be written"
        ) from error


def library_path(target: Target, folder: Path | None = None, sources: Path = SOURCES) -> Path:
    """Where the target's library is or will be, inside ``folder`` (default `cache_folder`)."""
    key = hashlib.sha256()
    for path in sorted([*sources.glob("*.hip"), *sources.glob("*.h")]):
        key.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    commands = (target.compile, target.linker, target.link, target.device_libraries, _identity(target.compiler))
    key.update(repr(commands).encode())
    if "-march=native" in target.compile:
        key.update(_cpu_features())
    name = target.name.replace(",", "-")
    return (cache_folder() if folder is None else folder) / f"kernels-{name}-{key.hexdigest()[:20]}.so"


def build(target: Target, folder: Path | None = None, sources: Path = SOURCES, patience: float = PATIENCE) -> Path:
    """The target's library; compiled unless it is there.

    Args:
        target: what to compile for.
        folder: where to keep it; default `cache_folder`.
        sources: folder of the ``*.hip`` and ``*.h`` files.
        patience: seconds to wait for another process that builds the same.

    Raises:
        KernelBuildError: the folder cannot be written, the compiler fails (with its output), or the wait was too long.
    """
    path = library_path(target, folder, sources)
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path.with_suffix(".lock"), patience):
            if not path.exists():
                _build(target, path, sources)
    except OSError as error:
        raise KernelBuildError(
            f"cannot build the kernels for {target.name} in {path.parent}: {error}; "
            "set PIPERT_CACHE to a folder that can be written"
        ) from error
    return path


def _build(target: Target, path: Path, sources: Path) -> None:
    """Compile every source, link, rename. Only the holder of the lock is here."""
    for stale in path.parent.glob(f"{path.stem}.building-*"):  # of a build that was killed
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{path.stem}.building-", dir=path.parent) as folder:
        flags = (*target.compile, *device_library_flags(target, folder))
        units = sorted(sources.glob("*.hip"))
        objects = [f"{folder}/{unit.stem}.o" for unit in units]

        def compile_one(unit: Path, output: str) -> None:
            _run(target, [target.compiler, *flags, "-c", str(unit), "-o", output])

        with ThreadPoolExecutor(min(len(units), os.cpu_count() or 1)) as pool:
            list(pool.map(compile_one, units, objects))
        library = f"{folder}/library.so"
        _run(target, [target.linker, *target.link, *objects, "-o", library])
        os.replace(library, path)


def _run(target: Target, command: list[str]) -> None:
    environment = {**os.environ, **dict(item.split("=", 1) for item in target.environment)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    # A warning that a newer compiler thinks of must not cost a user the kernels; the project's own tests allow none.
    strict = os.environ.get("PIPERT_KERNEL_WARNINGS") == "error"
    if done.returncode != 0 or (strict and re.search(r"\bwarning\b[: ]", done.stderr)):
        raise KernelBuildError(
            f"compiling the kernels for {target.name} failed with exit code {done.returncode}: {' '.join(command)}\n"
            + (done.stderr or done.stdout)[-4000:]
        )


@contextlib.contextmanager
def _lock(path: Path, patience: float) -> Iterator[None]:
    """Hold the file's lock; a lock file without a holder locks nothing."""
    give_up = time.monotonic() + patience
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise KernelBuildError(
                        f"another process has been building the kernels for {patience:.0f} s (it holds {path}); "
                        "end it, or set PIPERT_CACHE to another folder"
                    ) from None
                time.sleep(0.05)
        yield


def _identity(compiler: str) -> str:
    """What a compiler says about its version."""
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(f"the compiler {compiler} does not run: {error}") from error
    return done.stdout


def _cpu_features() -> bytes:
    """The lines of /proc/cpuinfo that ``-march=native`` depends on, of the first CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().split(b"\n\n", 1)[0].splitlines()
    except OSError:
        return os.uname().machine.encode()
    return b"\n".join(line for line in lines if line.startswith((b"flags", b"Features", b"model name", b"vendor_id")))
