"""What one process shares among all its MPI transports: the board, the watchdog, the hooks that end a failed job.

MPI is process-wide, and so are exits and uncaught exceptions. All of that state is one `Job`, made by the first
``MpiTransport.world()`` of the process.

How a job ends:

* A rank raises. Its exception hook enters the first cause on the board; every rank's watchdog sees it, every rank
  prints it, and when all have (or two seconds later) they leave with a non-zero code.
* A script ends, well or by ``sys.exit``. The rank keeps MPI going until all others have ended too, then finalizes.
  Ranks that wait for one that has left say so and end the job.
* A process is killed. The others' watchdogs notice (unless the launcher kills them first).
* A wait passes its deadline. The rank enters that as the first cause.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Any

from pipert.comm.board import Board, Cause, Kind, State, mpi_segments
from pipert.comm.errors import HangError, JobAborted, OptionError
from pipert.comm.mpi_nodes import Node, join_board
from pipert.comm.mpi_start import StartGuard, check_size, finalize_mpi, start_mpi
from pipert.comm.reports import chain, exception_text, farewell, first_words, in_from, stack_text
from pipert.comm.wait import Progress, WaitPolicy, wait_until
from pipert.comm.watchdog import Watchdog

#: Seconds that ranks stay to let all others print the first cause.
_FAREWELL = 2.0
#: Seconds in which a failed rank's main thread may still unwind (``finally`` blocks) before its watchdog ends it.
_UNWIND = 3.0
#: Seconds after which a message from a rank that has left will not come any more.
_LEFT = 3.0
#: Room for a first cause that travels to another machine.
_NOTE = 4096


class Job:
    """The process's part of an MPI job. Made once, by `job`.

    Attributes:
        mpi: the module ``mpi4py.MPI``.
        rank: this rank of the world.
        size: the world's ranks.
        board: this machine's board.
        bells: the doorbells of this machine's ranks, None where there are none.
        policy: how this process waits.
        progress: the collectives under way.
    """

    def __init__(self, deadline: float) -> None:
        """Start MPI and join the machine's board. Collective over the world.

        Raises:
            TransportError: see `start_mpi` and `check_size`.
        """
        self._owned = "mpi4py.MPI" not in sys.modules or not sys.modules["mpi4py.MPI"].Is_initialized()
        self._pid = os.getpid()
        with StartGuard(deadline):
            self.mpi = start_mpi()
            world = self.mpi.COMM_WORLD
            self.rank: int = world.Get_rank()
            self.size: int = world.Get_size()
            check_size(self.size, self.mpi.Get_library_version().split("\n")[0].strip("\0 "))
            self.comm = world.Dup()
            self._node: Node = join_board(self.mpi, self.comm)
        self.board: Board = self._node.board
        self.bells = self.board.doorbells()
        self.policy = WaitPolicy.from_environment(len(self._node.ranks))
        self.progress = Progress()
        self._said = threading.Lock()
        self._silent = True
        self._forwarded: list[Any] | None = None
        self._note = bytearray(_NOTE)
        self._arrival = self.comm.Irecv(self._note, self.mpi.ANY_SOURCE, 1) if self._node.elsewhere else None
        self.watchdog = Watchdog(self.board, self.rank, self._on_abort)
        self._install()

    def _install(self) -> None:
        if self.size == 1:
            if self._owned:
                atexit.register(finalize_mpi, self.mpi)
            return
        self._previous_hook = sys.excepthook
        sys.excepthook = self._on_exception
        atexit.register(self._on_exit)
        self.watchdog.start()

    # ---- while all is well ------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Raise what another rank has failed with.

        Raises:
            JobAborted: another rank, or this one, failed first.
        """
        if self._arrival is not None and not self.board.aborted and self._arrival.Test():
            self.board.claim(_unpack(self._note))
        if self.board.aborted:
            self._forward()
            cause = self.board.cause()
            assert cause is not None
            raise JobAborted(first_words(cause))

    def check_present(self, peer: int, doing: str, waited: float) -> None:
        """Raise when ``peer`` (of the world) has ended its script although this rank waits for it.

        Raises:
            HangError: it has.
        """
        if waited < _LEFT:
            return
        status = next((status for status in self.board.statuses() if status.rank == peer), None)
        if status is None or status.state not in (State.LEFT, State.FINISHED):
            return
        if time.monotonic() - status.since > _LEFT:
            text = f"rank {peer} left while rank {self.rank} waits in {doing or 'a wait'} from it"
            raise self._claimed(Kind.LEFT, peer, f"{text}: its script ended, or called sys.exit")

    def hang(self, doing: str, peer: int | None, waited: float, deadline: float) -> HangError:
        """Enter a wait that has passed its deadline as the first cause.

        Returns:
            The error to raise: what is waited for, who owes it and what that rank is doing.
        """
        held_up = chain(self.board.statuses(), self.rank, time.monotonic()).splitlines()[1:]
        head = f"rank {self.rank} waited {waited:.1f} s {in_from(doing, peer)}; the deadline is {deadline:g} s"
        hint = "more time is given by deadline= or PIPERT_DEADLINE (seconds)"
        return self._claimed(Kind.HANG, self.rank, "\n".join([head, *held_up, hint]))

    def _claimed(self, kind: Kind, rank: int, text: str) -> HangError:
        self.board.claim(Cause(rank, kind, text, time.time()))
        self._forward()
        return HangError(text)

    # ---- when something fails ---------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Enter an exception of this rank as the first cause, unless there is one."""
        if isinstance(error, JobAborted) or self.size == 1:
            return
        self.board.claim(Cause(self.rank, Kind.ERROR, exception_text(error), time.time()))
        self._forward()

    def _forward(self) -> None:
        """Tell the other machines, once: one rank of each, and another one than this rank's neighbours tell."""
        if self._forwarded is not None:
            return
        self._forwarded = []
        cause = self.board.cause()
        if cause is not None:
            place = self._node.ranks.index(self.rank)
            for ranks in self._node.elsewhere:
                self._forwarded.append(self.comm.Isend(_pack(cause), ranks[place % len(ranks)], 1))

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != self._pid:
            self._previous_hook(kind, error, trace)
            return
        if not isinstance(error, JobAborted | HangError):
            self._previous_hook(kind, error, trace)
            self.board.state(State.FAILED)
        self.fail(error)
        self._say(stack_text(trace) if isinstance(error, HangError) and trace is not None else "")

    def _on_abort(self) -> None:
        """In the watchdog's thread: there is a first cause. Print it, give the main thread time to unwind, end."""
        cause, own = self.board.cause(), self.board.statuses()[self._node.ranks.index(self.rank)]
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        hung = cause is not None and cause.kind is Kind.HANG and own.waits is None
        self._say(stack_text(frame) if hung and frame is not None else "")
        time.sleep(_UNWIND)
        self._leave(1)

    def _say(self, stack: str = "") -> None:
        """Print the first cause, once a process."""
        with self._said:
            cause = self.board.cause()
            if self._silent and cause is not None:
                self._silent = False
                text = farewell(cause, self.board.statuses(), self.rank, time.monotonic(), stack)
                with suppress(OSError, ValueError):
                    sys.stdout.flush()
                os.write(2, f"{text}\n".encode())
                self.board.tell()

    def _leave(self, code: int) -> None:
        """End this process once every rank has printed the first cause, or has had the time to."""
        until = time.monotonic() + _FAREWELL
        while time.monotonic() < until and (self._node.elsewhere or not self._all_told()):
            if threading.current_thread() is threading.main_thread():
                for note in self._forwarded or ():
                    note.Test()
            time.sleep(0.02)
        if self._node.elsewhere:
            killer = threading.Thread(target=self.mpi.COMM_WORLD.Abort, args=(code,), daemon=True)
            killer.start()
            killer.join(5.0)
        for segment in mpi_segments(self._pid):  # MPI_Finalize would have; every rank has them mapped by now
            segment.unlink(missing_ok=True)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)

    def _all_told(self) -> bool:
        return all(status.told or status.state is State.ABSENT for status in self.board.statuses())

    # ---- when the script ends ---------------------------------------------------------------------------------------

    def _on_exit(self) -> None:
        if os.getpid() != self._pid or self.mpi.Is_finalized():
            return
        if self.board.aborted:
            self._say()
            self._leave(1)
        self.board.report("the end of its script")
        self.board.state(State.LEFT)
        others = self.comm.Ibarrier()
        try:
            wait_until(lambda: self._step(others), self.policy, self._check_exit)
        except JobAborted:
            self._say()
            self._leave(1)
        self.board.state(State.FINISHED)
        if self._arrival is not None:
            self._arrival.Cancel()
            self._arrival.Wait()
        if self._owned:
            with self.watchdog.guard("MPI_Finalize", 60.0):
                finalize_mpi(self.mpi)
        self.watchdog.stop()

    def _step(self, request: Any) -> bool:
        self.progress.poll()
        return bool(request.Test())

    def _check_exit(self, waited: float) -> None:
        self.look()
        limit = exit_deadline()
        if waited > limit:
            busy = [str(status.rank) for status in self.board.statuses() if status.state is State.RUNNING]
            text = f"rank {self.rank} has ended and waited {waited:.0f} s for ranks {', '.join(busy)} to end"
            self.board.claim(Cause(self.rank, Kind.HANG, f"{text} (PIPERT_EXIT_DEADLINE)", time.time()))


def _pack(cause: Cause) -> bytes:
    head = f"{cause.rank} {int(cause.kind)} {cause.when}\n"
    return (head + cause.text).encode()[: _NOTE - 1] + b"\0"


def _unpack(note: bytes | bytearray) -> Cause:
    head, text = bytes(note).split(b"\0", 1)[0].decode(errors="replace").split("\n", 1)
    rank, kind, when = head.split()
    return Cause(int(rank), Kind(int(kind)), text, float(when))


def seconds_from_environment(name: str, default: float) -> float:
    """Read a positive number of seconds.

    Raises:
        OptionError: it is not one.
    """
    text = os.environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = 0.0
    if not value > 0:
        raise OptionError(f"{name} = {text!r} is not a time; give a positive number of seconds")
    return value


def exit_deadline() -> float:
    """How long a rank that has ended waits for the others: ``PIPERT_EXIT_DEADLINE``, else an hour."""
    return seconds_from_environment("PIPERT_EXIT_DEADLINE", 3600.0)


_lock = threading.Lock()
_jobs: list[Job] = []  # at most one: MPI exists once a process


def job(deadline: float) -> Job:
    """This process's job, started if it has not been. Collective over the world the first time."""
    with _lock:
        if not _jobs:
            _jobs.append(Job(deadline))
        return _jobs[0]
