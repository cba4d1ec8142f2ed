"""Starting a script on several MPI ranks of this machine.

Finds the MPI that mpi4py uses, shares the cores out, works as root, ends the whole job when it is interrupted, and
reads the ranks' status boards after a job that failed. Imports neither torch nor MPI.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from pipert.comm.board import Board, State, mpi_segments
from pipert.comm.errors import TransportError
from pipert.comm.mpi_start import promised_rank
from pipert.comm.reports import post_mortem
from pipert.errors import PipertError

#: Seconds that an interrupted job has to end before it is killed.
_GRACE = 5.0


#: Seconds that the other ranks give the first one to say why it ends: some launchers end all ranks with the first.
_HEARD = 1.0


class LaunchError(PipertError, RuntimeError):
    """A job cannot be started as asked."""


@dataclass(frozen=True)
class Launcher:
    """A program that starts MPI ranks.

    Attributes:
        path: the program.
        kind: ``"hydra"`` (MPICH), ``"openmpi"`` or ``"other"``, which decides its options.
        version: the line in which it names itself.
    """

    path: Path
    kind: str
    version: str

    def command(self, ranks: int, argv: Sequence[str]) -> list[str]:
        """The command line that runs ``python argv...`` on so many ranks."""
        options = {
            # More ranks than cores, and threads that may use every core.
            "openmpi": ["--oversubscribe", "--bind-to", "none"],
        }
        return [str(self.path), *options.get(self.kind, []), "-n", str(ranks), sys.executable, *argv]

    def environment(self) -> dict[str, str]:
        """What must be set for it."""
        if self.kind == "openmpi" and os.geteuid() == 0:
            return {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return {}


def find_launcher(environ: Mapping[str, str] = os.environ) -> Launcher:
    """The launcher that belongs to this Python's MPI: ``PIPERT_MPIEXEC``, the wheel's beside Python, else from PATH.

    Raises:
        LaunchError: there is none.
    """
    given = environ.get("PIPERT_MPIEXEC")
    beside = Path(sys.executable).parent
    candidates = [given] if given else [str(beside / "mpiexec"), "mpiexec", "mpirun"]
    for candidate in candidates:
        path = shutil.which(candidate, path=environ.get("PATH"))
        if path is not None:
            return _identified(Path(path))
    raise LaunchError(
        f"no MPI launcher found ({', '.join(candidates)}); pip install 'pipert[mpich]', load the site's MPI module, "
        "or name one in PIPERT_MPIEXEC"
    )


def _identified(path: Path) -> Launcher:
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{path} --version failed ({error}); name a working launcher in PIPERT_MPIEXEC") from error
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()] or ["unknown"]
    if "HYDRA" in text:
        version = next((line.removeprefix("Version: ") for line in lines if line.startswith("Version:")), "")
        return Launcher(path, "hydra", f"MPICH {version} (hydra)")
    kind = "openmpi" if any(name in text for name in ("Open MPI", "OpenRTE", "PRRTE", "open-mpi")) else "other"
    return Launcher(path, kind, lines[0])


def threads_per_rank(ranks: int) -> int:
    """This machine's cores, shared out."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def memory_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What tells glibc's malloc to keep freed memory for the next step; nothing where the user has told it anything.

    By itself it gives memory back to the kernel between steps, and more of it the more a schedule keeps live. The
    kernel fills each page with zeros when it is touched again, which makes backwards in two halves slower than whole
    ones. Blocks above 32 MiB, malloc's own limit, still come from the kernel.
    """
    if "GLIBC_TUNABLES" in environ or any(name.startswith("MALLOC_") for name in environ):
        return {}
    return {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def launch(
    n: int,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    say: Callable[[str], None] | None = None,
    timeout: float | None = None,
    stdout: int | None = None,
) -> int:
    """Run ``python argv...`` on ``n`` MPI ranks of this machine and wait for it.

    Each rank gets ``OMP_NUM_THREADS`` (unless that is set already), and keeps memory that it frees
    (`memory_environment`). An interrupt (Ctrl-C, SIGTERM, SIGHUP) ends all ranks.

    Args:
        n: how many ranks.
        argv: a script and its arguments, or ``-m``, a module and its arguments.
        env: more environment variables for the ranks.
        say: gets lines for the user: what is run, and a post-mortem if ranks could not speak; where None they go to
            standard error.
        timeout: seconds after which everything is killed, with exit code 124.
        stdout: where the ranks' output goes, as for `subprocess.Popen`.

    Returns:
        The job's exit code; 130 after Ctrl-C, 128 + the signal after another one.

    Raises:
        LaunchError: no such script, no ranks, or no launcher.
    """
    if n < 1:
        raise LaunchError(f"{n} ranks cannot run anything; use n >= 1")
    if not argv:
        raise LaunchError("nothing to run; name a script, or -m and a module")
    if not argv[0].startswith("-") and not Path(argv[0]).is_file():
        raise LaunchError(f"there is no script {argv[0]!r} in {Path.cwd()}")
    say = say or _to_stderr
    launcher = find_launcher()
    threads = os.environ.get("OMP_NUM_THREADS") or str(threads_per_rank(n))
    with tempfile.TemporaryDirectory(prefix="pipert-", dir=_shared_folder()) as boards:
        more = {"OMP_NUM_THREADS": threads, "PIPERT_BOARD_DIR": boards, **memory_environment(os.environ)}
        more |= {**launcher.environment(), **(env or {})}
        command = launcher.command(n, argv)
        say(
            f"pipert launch: {n} rank{'s'[: n > 1]} x {threads} thread{'s'[: threads != '1']} of {' '.join(argv)}"
            f"  [{launcher.version}: {launcher.path}]"
        )
        code, dead = _run(command, {**os.environ, **more}, Path(boards), timeout, stdout)
        if code != 0:
            for line in _last_words(Path(boards), dead):
                say(line)
            say(f"pipert launch: the job ended with exit code {code}")
    return code


def _run(
    command: Sequence[str], environ: Mapping[str, str], boards: Path, timeout: float | None, stdout: int | None
) -> tuple[int, list[int]]:
    """Run the job. Returns its exit code, and the ranks whose processes died first, without a word."""
    with _signals_as_interrupts():
        process = subprocess.Popen(
            command, env=dict(environ), stdout=stdout, start_new_session=True, preexec_fn=_end_with_parent
        )
        deaths = _Deaths(boards)
        until = None if timeout is None else time.monotonic() + timeout
        try:
            while (code := process.poll()) is None:
                if until is not None and time.monotonic() > until:
                    code = 124
                    break
                deaths.wait(0.1)
        except _Interrupt as interrupt:
            code = 128 + interrupt.number
        finally:
            _end(process)
            for segment in deaths.segments:
                segment.unlink(missing_ok=True)
    return (code if code >= 0 else 128 - code), deaths.first


class _Deaths:
    """Notices which rank died first: MPICH's launcher kills the others at once, so none of them can tell.

    Attributes:
        first: the ranks that were found dead together, usually one.
        segments: shared memory that MPICH leaves behind when its processes are killed.
    """

    def __init__(self, folder: Path) -> None:
        self.first: list[int] = []
        self.segments: set[Path] = set()
        self._folder = folder
        self._boards: dict[Path, Board] = {}
        self._poll = select.poll()
        self._ranks: dict[int, tuple[Board, int]] = {}
        self._known: set[int] = set()

    def wait(self, seconds: float) -> None:
        """Wait until a rank dies, at most so long."""
        found = self._look_for_ranks()
        for descriptor, _ in self._poll.poll(0 if found else seconds * 1000):
            found.append(self._ranks[descriptor])
            self._poll.unregister(descriptor)
            os.close(descriptor)
        if not self.first:
            self.first = [rank for board, rank in found if not board.aborted and _runs(board, rank)]

    def _look_for_ranks(self) -> list[tuple[Board, int]]:
        """Begin to watch ranks that have joined since. Returns those that are dead already."""
        dead = []
        for path in self._folder.glob("*.board"):
            if path not in self._boards:
                with suppress(TransportError):
                    self._boards[path] = Board.open(path)
        for board in self._boards.values():
            for status in board.statuses():
                if status.pid == 0 or status.pid in self._known:
                    continue
                self._known.add(status.pid)
                try:
                    descriptor = os.pidfd_open(status.pid)
                except ProcessLookupError:
                    dead.append((board, status.rank))
                except (AttributeError, OSError):  # no Linux, or an old one
                    continue
                else:
                    self._poll.register(descriptor, select.POLLIN)
                    self._ranks[descriptor] = board, status.rank
                    self.segments.update(mpi_segments(status.pid))
        return dead


def _runs(board: Board, rank: int) -> bool:
    return any(status.rank == rank and status.state is State.RUNNING for status in board.statuses())


class _Interrupt(BaseException):
    """A signal that asks the launcher to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def _signals_as_interrupts() -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _Interrupt(number)

    previous = {}
    with suppress(ValueError):  # not the main thread: then signals are the caller's
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            previous[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a job: the launcher and every process of its session."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
    kill_session(process.pid)
    process.wait()


def kill_session(session: int) -> None:
    """Kill every process of a session that still lives: launchers put ranks into process groups of their own."""
    for _ in range(50):
        pids = session_processes(session)
        if not pids:
            return
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def session_processes(session: int) -> list[int]:
    """The live processes of a session."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(int(entry.name))
    return found


def _end_with_parent() -> None:
    """In the new process: get SIGTERM when the one that started it dies, so that a killed launcher leaves no job."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _shared_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _last_words(folder: Path, dead: Sequence[int]) -> Iterator[str]:
    """What the boards say of ranks that could not print the first cause themselves."""
    for path in sorted(folder.glob("*.board")):
        with suppress(TransportError):
            board = Board.open(path)
            statuses, cause = board.statuses(), board.cause()
            if dead and cause is None:
                who = " or ".join(f"rank {rank}" for rank in dead)
                yield f"pipert launch: {who} died first: killed (kill -9, out of memory) or left by os._exit"
            if any(status.state is State.RUNNING and not status.told for status in statuses):
                yield "pipert launch: ranks ended without a word; the last that is known of each:"
                yield post_mortem(cause, statuses, time.monotonic())
            board.close()


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def end_before_mpi(message: str) -> NoReturn:
    """End a script, with exit code 1, that cannot start as asked: what every rank finds out, rank 0 alone says.

    MPI is not started for it: which rank this is, the launcher's environment variables say.

    Raises:
        SystemExit: always.
    """
    if promised_rank() in (None, 0):
        sys.exit(message)
    time.sleep(_HEARD)
    sys.exit(1)
