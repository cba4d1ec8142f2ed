"""Compare two timelines of the same actions, for example the predicted and the measured one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipert.scheduler.action import KIND_MASK, KIND_SHIFT, Action, Kind
from pipert.scheduler.errors import TimelineError
from pipert.scheduler.row import Codes, distinct
from pipert.scheduler.timeline import Seconds, Timeline


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two timelines, action by action; both count their times from their first start.

    Attributes:
        first: the timeline that is the measure, for example the predicted one.
        second: the one that is compared with it.
        ranks: the rank of every action that both have, int64 ``[actions]``.
        codes: the packed actions, in the first one's order.
        start_differences: the second's start minus the first's, float64 ``[actions]``.
        duration_differences: the second's duration minus the first's.
    """

    first: Timeline
    second: Timeline
    ranks: npt.NDArray[np.int64]
    codes: Codes
    start_differences: Seconds
    duration_differences: Seconds

    @property
    def ratio(self) -> float:
        """The second's makespan over the first's."""
        return self.second.makespan / self.first.makespan if self.first.makespan else float("nan")

    def latest(self, count: int = 5) -> list[tuple[int, Action, float]]:
        """The actions that start latest compared with the first timeline: rank, action, difference."""
        order = np.argsort(-self.start_differences, kind="stable")[:count]
        return [
            (int(self.ranks[at]), Action.from_code(int(self.codes[at])), float(self.start_differences[at]))
            for at in order.tolist()
        ]

    def __str__(self) -> str:
        lines = [
            f"{self.second.name} against {self.first.name}: makespan {self.second.makespan:.6g} against "
            f"{self.first.makespan:.6g}, ratio {self.ratio:.4f}"
        ]
        kinds = self.codes >> KIND_SHIFT & KIND_MASK
        for kind in map(Kind, distinct(kinds).tolist()):
            here = kinds == kind
            starts, durations = self.start_differences[here], self.duration_differences[here]
            lines.append(
                f"  {kind.name:<9} {np.count_nonzero(here):>7,} actions  start {starts.mean():+.3g} on average, "
                f"{starts.max():+.3g} at most  duration {durations.mean():+.3g}, {durations.max():+.3g}"
            )
        return "\n".join(lines)


def compare(first: Timeline, second: Timeline) -> Comparison:
    """Compare the actions that two timelines have in common, rank by rank.

    Raises:
        TimelineError: they have different numbers of ranks, nothing in common, or an action twice on one rank.
    """
    if first.num_ranks != second.num_ranks:
        raise TimelineError(
            f"{first.name} has {first.num_ranks} ranks and {second.name} {second.num_ranks}; compare runs of one layout"
        )
    ranks, mine, theirs = [], [], []
    for rank in range(first.num_ranks):
        codes, others = first.lane(rank).codes, second.lane(rank).codes
        for name, own in ((first.name, codes), (second.name, others)):
            if len(distinct(own)) < len(own):
                raise TimelineError(f"{name} has an action twice on rank {rank}; compare single steps")
        _, here, there = np.intersect1d(codes, others, assume_unique=True, return_indices=True)
        order = np.argsort(here)
        mine.append(first.offsets[rank] + here[order])
        theirs.append(second.offsets[rank] + there[order])
        ranks.append(np.full(len(here), rank))
    at, to = np.concatenate(mine), np.concatenate(theirs)
    if not len(at):
        raise TimelineError(f"{first.name} and {second.name} have no action in common")
    starts = (second.starts[to] - second.start) - (first.starts[at] - first.start)
    durations = (second.ends[to] - second.starts[to]) - (first.ends[at] - first.starts[at])
    return Comparison(first, second, np.concatenate(ranks), first.codes[at], starts, durations)
