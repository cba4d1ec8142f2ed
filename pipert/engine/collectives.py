"""Collectives under way: each is started where it stands in the row, and waited for where its result is needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from pipert.comm.transport import Request, Transport
from pipert.scheduler.action import Action, Kind


class Collective(Protocol):
    """What a REDUCE, TIE, SCATTER or GATHER starts and, when all its requests are complete, finishes."""

    @property
    def transport(self) -> Transport:
        """On it the requests are waited for."""
        ...

    def start(self) -> list[Request]:
        """Start it."""
        ...

    def finish(self) -> None:
        """Use the result."""
        ...


class _Started(NamedTuple):
    position: int
    action: Action
    collective: Collective
    requests: list[Request]


class Pending:
    """The collectives that a rank has started and not finished, in the order of its row.

    Args:
        ends: when each action of the row ended; set for a collective when it is finished.
    """

    def __init__(self, ends: list[float]) -> None:
        self._ends = ends
        self._started: list[_Started] = []

    def __bool__(self) -> bool:
        return bool(self._started)

    def start(self, action: Action, collective: Collective) -> None:
        """Start one, the next action of the row.

        A SCATTER holds a copy of its stage's gradients until it is complete, so there is one at a time. Waiting for the
        one before cannot close a circle: all replicas run the same program, so they can run it in step.
        """
        if action.kind is Kind.SCATTER:
            self.settle(lambda earlier: earlier.kind is Kind.SCATTER)
        self._started.append(_Started(len(self._ends), action, collective, collective.start()))

    def reap(self) -> None:
        """Finish the first ones, as far as they are complete, without waiting."""
        while self._started and all(request.test() for request in self._started[0].requests):
            self._finish([self._started.pop(0)])

    def settle(self, needed: Callable[[Action], bool]) -> None:
        """Wait for some of them."""
        mine = [one for one in self._started if needed(one.action)]
        self._started = [one for one in self._started if not needed(one.action)]
        self._finish(mine)

    def finish(self) -> None:
        """Wait for all of them."""
        started, self._started = self._started, []
        self._finish(started)

    def _finish(self, started: Iterable[_Started]) -> None:
        for position, action, collective, requests in started:
            for request in requests:
                collective.transport.wait(request, action)
            collective.finish()
            self._ends[position] = time.perf_counter()
