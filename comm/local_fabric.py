"""The threads of a local job: waiting, waking, proving deadlocks and ending together."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from pipert.comm.errors import HangError, JobAborted, MessageError
from pipert.comm.faults import Faults
from pipert.comm.local_matching import Matching, Rules
from pipert.comm.local_operations import Operation, Receive


class Killed(BaseException):
    """Ends the thread of a rank that the fault plan kills; no handler of ordinary errors sees it."""


@dataclass(frozen=True)
class Failure:
    """What ended the job first, and on which rank; None when it is a fault of all ranks together."""

    error: BaseException
    rank: int | None

    def seen_from(self, rank: int) -> BaseException:
        """The exception that this rank raises. Ranks do not share one object: each has a traceback of its own."""
        if self.rank is None:
            return type(self.error)(*self.error.args)
        if self.rank == rank:
            return self.error
        notes = "".join(f"\n  {note}" for note in getattr(self.error, "__notes__", ()))
        aborted = JobAborted(f"rank {self.rank} failed first: {type(self.error).__name__}: {self.error}{notes}")
        aborted.__cause__ = self.error
        return aborted


@dataclass(frozen=True)
class _Wait:
    operation: Operation
    doing: object


class Fabric:
    """What the ranks of one local job share. One lock; each rank sleeps on a condition of its own, so nobody polls.

    A rank counts as blocked from the moment it waits for something incomplete until the moment another thread completes
    it (not until it wakes up). So when as many ranks are blocked as are alive and nothing that has met is under way,
    nothing can ever happen again: a deadlock, raised on all ranks at once.
    """

    def __init__(self, size: int, rules: Rules, faults: Faults, deadline: float | None) -> None:
        self.size = size
        self.faults = faults
        self.failure: Failure | None = None
        self.deadline = deadline
        self._lock = threading.Lock()
        self._wake = [threading.Condition(self._lock) for _ in range(size)]
        self._all_left = threading.Condition(self._lock)
        self._matching = Matching(rules, faults, self._on_done)
        self._waits: list[_Wait | None] = [None] * size
        self._doing: list[object] = [""] * size
        self._left = [False] * size
        self._threads: list[int | None] = [None] * size
        self._blocked = 0
        self._live = size
        self._alarm: float | None = None
        self._started = [0] * size
        self._kills = dict(faults.kill)

    # ---- what a rank calls -----------------------------------------------------------------------------------------

    def enter(self, rank: int) -> None:
        """Tell which thread a rank is; for reports."""
        self._threads[rank] = threading.get_ident()

    def post(self, *unit: Operation) -> None:
        """Start an operation, or several of one rank as a group.

        Raises:
            MessageError: it, or what it sets free, does not fit its other half.
            JobAborted: another rank failed first.
        """
        rank = unit[0].rank
        with self._lock:
            self._check(rank)
            for operation in unit:
                self._kill_if_planned(operation)
            self._step(lambda: self._matching.post(*unit))
            self._check(rank)

    def poll(self, rank: int) -> None:
        """Deliver what is due (the next message, when time is virtual).

        Raises:
            JobAborted: another rank failed first.
        """
        with self._lock:
            self._check(rank)
            if self._matching.next_due() is not None:
                self._step(self._matching.deliver_due)
            elif self._matching.under_way():
                self._step(self._matching.deliver_next)
            self._check(rank)

    def wait(self, operation: Operation, doing: object) -> None:
        """Sleep until the operation is complete.

        Raises:
            HangError: a deadlock, or the deadline passed, here or on another rank.
            MessageError: messages that do not fit met meanwhile.
            JobAborted: another rank failed first.
        """
        if operation.done:
            return
        rank = operation.rank
        with self._lock:
            self._check(rank)
            self._step(self._matching.deliver_due)
            if not operation.done and self.failure is None:
                self._waits[rank] = _Wait(operation, doing)
                self._blocked += 1
                try:
                    self._settle()
                    self._sleep(operation)
                finally:
                    self._unblock(rank)
            if not operation.done:
                self._check(rank)

    def report(self, rank: int, doing: object) -> None:
        """Remember what a rank does now; formatted only if a report is needed."""
        self._doing[rank] = doing

    def doing(self, rank: int) -> object:
        """What a rank last reported."""
        return self._doing[rank]

    def fail(self, error: BaseException, rank: int | None) -> Failure:
        """End the job, unless it has already failed; everybody wakes up and raises. Returns the first failure."""
        with self._lock:
            return self._fail(error, rank)

    def leave(self, rank: int) -> None:
        """A rank's function has ended, one way or the other."""
        with self._lock:
            self._left[rank] = True
            self._live -= 1
            if self._live:
                self._settle()
            self._all_left.notify_all()

    # ---- what run_ranks calls --------------------------------------------------------------------------------------

    def join(self, grace: float) -> list[int]:
        """Wait until every rank has left; once the job has failed, for ``grace`` seconds at most.

        Returns:
            The threads (idents) of the ranks that have not left.
        """
        with self._lock:
            while self._live and self.failure is None:
                self._all_left.wait()
            end = time.monotonic() + grace
            while self._live and (left := end - time.monotonic()) > 0:
                self._all_left.wait(left)
            return [thread for thread, gone in zip(self._threads, self._left, strict=True) if thread and not gone]

    def leftovers(self) -> list[str]:
        """After the end: each operation that has not met its other half. Makes the deliveries still under way."""
        with self._lock:
            while self._matching.under_way() and self.failure is None:
                self._step(self._matching.deliver_next)
            return self._matching.leftovers()

    # ---- under the lock --------------------------------------------------------------------------------------------

    def _check(self, rank: int) -> None:
        if self.failure is not None:
            raise Killed if self._killed(rank) else self.failure.seen_from(rank)

    def _killed(self, rank: int) -> bool:
        return rank in self._kills and self._started[rank] > self._kills[rank]

    def _kill_if_planned(self, operation: Operation) -> None:
        rank = operation.rank
        count = self._started[rank]
        self._started[rank] += 1
        if self._killed(rank):
            text = f"rank {rank} was killed by the fault plan at its operation {count} ({operation.name()})"
            self._fail(JobAborted(text), None)
            raise Killed

    def _step(self, step: Callable[[], None]) -> None:
        try:
            step()
        except MessageError as error:
            self._fail(error, None)
        alarm, self._alarm = self._alarm, self._matching.next_due()
        if self._alarm is not None and (alarm is None or self._alarm < alarm):
            for condition in self._wake:  # whoever sleeps must not sleep past the new first delivery
                condition.notify()

    def _on_done(self, operation: Operation) -> None:
        wait = self._waits[operation.rank]
        if wait is not None and wait.operation is operation:
            self._unblock(operation.rank)
            self._wake[operation.rank].notify()

    def _unblock(self, rank: int) -> None:
        if self._waits[rank] is not None:
            self._waits[rank] = None
            self._blocked -= 1

    def _settle(self) -> None:
        while self.failure is None and self._blocked == self._live:
            if not self._matching.under_way():
                text = "deadlock: every live rank waits and nothing is under way" + self._describe()
                self._fail(HangError(text), None)
            elif self._matching.next_due() is not None:
                return  # real time will tell
            else:
                self._step(self._matching.deliver_next)

    def _sleep(self, operation: Operation) -> None:
        limit = None if self.deadline is None else time.monotonic() + self.deadline
        while not operation.done and self.failure is None:
            times = [moment for moment in (limit, self._matching.next_due()) if moment is not None]
            self._wake[operation.rank].wait(max(0.0, min(times) - time.monotonic()) if times else None)
            self._step(self._matching.deliver_due)
            self._settle()
            if limit is not None and time.monotonic() >= limit and not operation.done and self.failure is None:
                text = f"rank {operation.rank} has waited {self.deadline:g} s, its deadline" + self._describe()
                self._fail(HangError(text), None)

    def _fail(self, error: BaseException, rank: int | None) -> Failure:
        if self.failure is None:
            self.failure = Failure(error, rank)
            for condition in (*self._wake, self._all_left):
                condition.notify_all()
        return self.failure

    def _describe(self) -> str:
        return "".join(f"\n  rank {rank} {self._describe_rank(rank)}" for rank in range(self.size))

    def _describe_rank(self, rank: int) -> str:
        if self._left[rank]:
            return "has finished"
        wait = self._waits[rank]
        if wait is not None:
            doing = str(wait.doing) or str(self._doing[rank])
            offered = self._matching.offered(wait.operation) if isinstance(wait.operation, Receive) else ""
            return f"waits in {doing}{': ' if doing else ''}{wait.operation.describe()}{offered}"
        frame = sys._current_frames().get(self._threads[rank] or 0)
        if frame is None:
            return "has not started"
        where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
        doing = str(self._doing[rank])
        return f"does not wait: it runs {doing}{', ' if doing else ''}{where}"
