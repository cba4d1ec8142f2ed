"""Found: the answer of a search."""

from __future__ import annotations

from dataclasses import dataclass

from pipert.scheduler.program import Program
from pipert.scheduler.schedule import Schedule


@dataclass(frozen=True)
class Found:
    """A schedule that was searched for, and how far it can be from the best one.

    Attributes:
        schedule: the schedule, its backwards in halves (on a transport perhaps whole); verified,
            within the limits.
        makespan: how long it takes with the costs; on a transport, how long `program` does.
        bound: no schedule of this work within these limits takes less.
        program: the schedule lowered for the transport that was given, verified; None if none was.
    """

    schedule: Schedule
    makespan: float
    bound: float
    program: Program | None = None

    @property
    def gap(self) -> float:
        """By what share the best schedule could be faster, at most: makespan / bound − 1."""
        return self.makespan / self.bound - 1 if self.bound else 0.0

    @property
    def optimal(self) -> bool:
        """Whether it is certain that no schedule is faster."""
        return self.makespan <= self.bound * (1 + 1e-12)

    def __str__(self) -> str:
        verdict = "no schedule is faster" if self.optimal else f"at most {self.gap:.2%} above the least possible"
        return f"{self.schedule.name}: makespan {self.makespan:.6g}, bound {self.bound:.6g}: {verdict}"
