"""Summary: the figures of a run without its actions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """What `Timeline` says about a run, kept in O(ranks).

    Attributes:
        name: what ran, for example ``1f1b``.
        num_actions: how many actions ran.
        makespan: from the first start to the last end, seconds (or the unit of the costs).
        busy: for each rank the time it computes.
        idle_within: for each rank the time between its own first start and last end in which it does not compute.
        peaks: for each rank the most micro-batches that are live at once.
    """

    name: str
    num_actions: int
    makespan: float
    busy: tuple[float, ...]
    idle_within: tuple[float, ...]
    peaks: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self.busy)

    @property
    def idle(self) -> tuple[float, ...]:
        """For each rank the part of the makespan in which it does not compute."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they do not compute: idle / (ranks · makespan)."""
        return sum(self.idle) / (self.num_ranks * self.makespan) if self.makespan else 0.0

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.num_ranks} ranks, {self.num_actions:,} actions, makespan {self.makespan:.6g}, "
            f"bubble {self.bubble:.2%}, peak live micro-batches {', '.join(map(str, self.peaks))}"
        )
