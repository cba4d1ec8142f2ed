"""How a rank waits: poll a little, give the core away, then sleep in short growing steps.

A blocking MPI wait polls without end and starves the ranks that compute on the same cores. The loop here polls
back to back for the few microseconds in which most messages arrive, then lets other ranks run between polls, and then
sleeps for a fixed share of the time already waited: a long wait costs no core and ends at most a few per cent late. A
message from the same machine ends the sleep (`pipert.comm.doorbell`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace

from pipert.comm.doorbell import Nap, PlainNap
from pipert.comm.errors import HangError, OptionError
from pipert.comm.transport import Request, Transport

_PLAIN = PlainNap()

#: A collective under way: yields the request it waits for, ends when the result is there.
Steps = Generator[Request, None, None]


@dataclass(frozen=True)
class WaitPolicy:
    """The phases of one wait.

    Attributes:
        spins: polls back to back before anything else.
        yielding: seconds of polls with ``sched_yield`` between them; ``inf`` never sleeps.
        shortest: the first sleep, in seconds.
        longest: the longest sleep, in seconds.
        share: a sleep lasts this part of the time already waited, between ``shortest`` and ``longest``.
        gives_way: call ``sched_yield`` in the yielding phase; False keeps the core (for dedicated cores).
    """

    spins: int = 32
    yielding: float = 300e-6
    shortest: float = 20e-6
    longest: float = 1e-3
    share: float = 0.05
    gives_way: bool = True

    @classmethod
    def dedicated(cls) -> WaitPolicy:
        """Never sleep nor give the core away: for ranks that have their cores to themselves."""
        return cls(yielding=float("inf"), gives_way=False)

    @classmethod
    def shared(cls, ranks: int, cores: int) -> WaitPolicy:
        """The default: shorter polling where ``ranks`` of one machine outnumber its ``cores``."""
        return cls() if ranks <= cores else replace(cls(), spins=6, yielding=60e-6)

    @classmethod
    def from_environment(cls, ranks: int, environ: Mapping[str, str] = os.environ) -> WaitPolicy:
        """Read ``PIPERT_WAIT``: ``yield`` (the default) or ``spin`` (for dedicated cores).

        Args:
            ranks: how many ranks share this machine.
            environ: where the variable is looked up.

        Raises:
            OptionError: another value.
        """
        choice = environ.get("PIPERT_WAIT", "yield")
        if choice == "spin":
            return cls.dedicated()
        if choice != "yield":
            raise OptionError(f"PIPERT_WAIT = {choice!r} is not a way to wait; use 'yield' or 'spin'")
        return cls.shared(ranks, len(os.sched_getaffinity(0)))


def wait_until(done: Callable[[], bool], policy: WaitPolicy, check: Callable[[float], None], nap: Nap = _PLAIN) -> None:
    """Poll ``done`` until it is true.

    Args:
        done: drives the operations and tells whether the one waited for is complete; never blocks.
        policy: the phases.
        check: called with the seconds waited so far, at least every few milliseconds once the first polls failed;
            raises what ends the wait early (a deadline, an aborted job).
        nap: how to sleep.
    """
    for _ in range(policy.spins):
        if done():
            return
    start = now = time.monotonic()
    while now - start < policy.yielding:
        for _ in range(16):
            if policy.gives_way:
                os.sched_yield()
            if done():
                return
        now = time.monotonic()
        check(now - start)
    while True:
        armed = nap.arm()
        if done():  # what came before the arming rings no more
            nap.disarm()
            return
        nap.sleep(armed, min(policy.longest, max(policy.shortest, policy.share * (now - start))))
        now = time.monotonic()
        check(now - start)


def wait_for_foreign(transport: Transport, request: Request, doing: object, deadline: float | None) -> None:
    """Poll a request that another transport of the same ranks has started.

    Args:
        transport: whose job it is: it is told of a hang, and tells of failures.
        request: what is waited for.
        doing: what this rank waits in.
        deadline: seconds the wait may last; None for ever.

    Raises:
        HangError: the deadline passed.
        JobAborted: another rank failed first.
    """

    def check(waited: float) -> None:
        transport.progress()
        if deadline is not None and waited >= deadline:
            error = HangError(f"rank {transport.rank} has waited {deadline:g} s, its deadline, in {doing or 'a wait'}")
            transport.abort(error)
            raise error

    wait_until(request.test, WaitPolicy(), check)


class Collective:
    """A collective operation under way, as a request.

    Attributes:
        peer: whom the collective waits for at the moment, as its messages' requests say; None if no one in particular.
    """

    __slots__ = ("_steps", "_waiting", "done")

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._waiting: Request | None = None
        self.done = False

    def test(self) -> bool:
        """Go on as far as the messages that have arrived allow."""
        if self.done:
            return True
        waiting = self._waiting
        while waiting is None or waiting.test():
            try:
                waiting = next(self._steps)
            except StopIteration:
                self._waiting = None
                self.done = True
                return True
        self._waiting = waiting
        return False

    @property
    def peer(self) -> int | None:
        """The rank of the message waited for."""
        return getattr(self._waiting, "peer", None)


class Progress:
    """The collectives that one rank has under way, over all its transports.

    Messages between two ranks progress inside MPI; a collective made of such messages needs somebody to take its next
    step. Every wait of the rank does.
    """

    def __init__(self) -> None:
        self._active: list[Collective] = []

    def start(self, steps: Steps) -> Collective:
        """Start a collective: takes its first steps at once."""
        collective = Collective(steps)
        if not collective.test():
            self._active.append(collective)
        return collective

    def poll(self) -> None:
        """Take every step that can be taken now."""
        if self._active:
            self._active = [collective for collective in self._active if not collective.test()]

    def __len__(self) -> int:
        return len(self._active)
