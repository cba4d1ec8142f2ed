"""A thread on every rank that ends the process when the job has failed, whatever the main thread is doing.

It makes no MPI calls. It sleeps on the processes of the machine's other ranks and so notices a killed one at once,
looks at the status board four times a second, and holds the deadline of calls that block (communicators, MPI_Finalize).
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipert.comm.board import Board, Cause, Kind, State
from pipert.comm.reports import describe


class Watchdog:
    """Watches one rank's board; daemon thread.

    Args:
        board: the machine's board; every rank has joined it.
        rank: this rank of the world.
        on_abort: called once, in the watchdog's thread, when a first cause is on the board; should end the process.
        period: seconds between looks.
    """

    def __init__(self, board: Board, rank: int, on_abort: Callable[[], None], period: float = 0.25) -> None:
        self._board = board
        self._rank = rank
        self._on_abort = on_abort
        self._period = period
        self._armed: tuple[float, float, str] | None = None
        self._poll = select.poll()
        self._watched: dict[int, int] = {}
        self._without_descriptor: dict[int, int] = {}
        self._watch_others()
        self._thread = threading.Thread(target=self._run, name="pipert-watchdog", daemon=True)
        self._stop = False

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no more. Does not wait for the thread, which ends within a period."""
        self._stop = True

    @contextmanager
    def guard(self, doing: str, deadline: float) -> Iterator[None]:
        """Put a deadline (seconds) on a call that blocks inside MPI."""
        self._board.wait_in(doing, None, time.monotonic())
        self._armed = (time.monotonic() + deadline, deadline, doing)
        try:
            yield
        finally:
            self._armed = None
            self._board.wait_over()

    def _watch_others(self) -> None:
        for status in self._board.statuses():
            if status.rank == self._rank:
                continue
            try:
                descriptor = os.pidfd_open(status.pid)
            except (AttributeError, OSError):  # an old kernel or no Linux, or the process is gone already
                self._without_descriptor[status.rank] = status.pid
                continue
            self._poll.register(descriptor, select.POLLIN)
            self._watched[descriptor] = status.rank

    def _run(self) -> None:
        while not self._stop:
            gone = [self._watched[descriptor] for descriptor, _ in self._poll.poll(self._period * 1000)]
            self._board.beat()
            gone += [rank for rank, pid in self._without_descriptor.items() if not _alive(pid)]
            for rank in gone:
                self._forget(rank)
                self._note_death(rank)
            armed = self._armed
            if armed is not None and time.monotonic() > armed[0]:
                self._note_hang(*armed[1:])
            if self._board.aborted and not self._stop:
                self._on_abort()
                return

    def _forget(self, rank: int) -> None:
        self._without_descriptor.pop(rank, None)
        for descriptor in [descriptor for descriptor, watched in self._watched.items() if watched == rank]:
            self._poll.unregister(descriptor)
            os.close(descriptor)
            del self._watched[descriptor]

    def _note_death(self, rank: int) -> None:
        status = next(status for status in self._board.statuses() if status.rank == rank)
        if status.state is State.FINISHED:
            return
        text = (
            f"rank {rank} died: its process {status.pid} was killed (kill -9, out of memory) or left by os._exit\n"
            f"  the last that is known: {describe(status, time.monotonic())}"
        )
        self._board.claim(Cause(rank, Kind.DIED, text, time.time()))

    def _note_hang(self, deadline: float, doing: str) -> None:
        text = f"rank {self._rank} waited {deadline:g} s, its deadline, in {doing}"
        self._board.claim(Cause(self._rank, Kind.HANG, text, time.time()))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
