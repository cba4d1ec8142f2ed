"""What a rule is, and small words that the rules share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pipert.scheduler.action import Action
from pipert.scheduler.index import Index, Mask
from pipert.scheduler.program import Program
from pipert.scheduler.verify.fault import Fault


@dataclass(frozen=True, eq=False)
class Subject:
    """What is verified.

    Attributes:
        index: where its actions are.
        limits: for each rank how many micro-batches of its stages may be live at once, or None.
    """

    index: Index
    limits: Sequence[int] | None = None

    @property
    def program(self) -> Program | None:
        """The target if it is a program."""
        return self.index.target if isinstance(self.index.target, Program) else None

    def at(self, rule: str, position: int, message: str, along: Iterable[int] = ()) -> Fault:
        """A fault at an action of a known kind; `along` are the positions that take part."""
        rank, place = self.index.locate(position)
        return Fault(rule, message, rank, place, self.index.action(position), tuple(map(self.index.locate, along)))

    def missing(self, rule: str, action: Action, message: str) -> Fault:
        """A fault because an action is not there."""
        return Fault(rule, message, int(self.index.owners[action.stage]), None, action)

    def place(self, position: int) -> str:
        """An action and where it is, in words."""
        rank, place = self.index.locate(position)
        return f"{self.index.action(position)} (rank {rank}, action {place})"


Finder = Callable[[Subject], Iterator[Fault]]
Describer = Callable[[Subject], str]


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        name: its short name.
        find: yields the faults, one after another.
        describe: what holds if there are none.
    """

    name: str
    find: Finder
    describe: Describer


def where(mask: Mask) -> Iterator[tuple[int, int]]:
    """The (stage, micro-batch) pairs at which a table's mask holds."""
    if mask.any():
        for stage, microbatch in np.argwhere(mask):
            yield int(stage), int(microbatch)
