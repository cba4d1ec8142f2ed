"""Where a search begins: the known schedules that fit, with their backwards in halves."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipert.scheduler.action import KIND_MASK, KIND_SHIFT, Kind
from pipert.scheduler.generators.registry import GENERATORS
from pipert.scheduler.generators.zero_bubble import zero_bubble
from pipert.scheduler.instance import Instance
from pipert.scheduler.live import live_changes
from pipert.scheduler.placement import Placement
from pipert.scheduler.row import Codes
from pipert.scheduler.schedule import Schedule


def known(instance: Instance, *, halves: bool = True) -> Iterator[list[Codes]]:
    """The rows of every schedule with this placement that keeps the ranks' memory.

    Args:
        instance: the work.
        halves: a backward becomes its two halves, one after the other: no computation is later than before, and the
            gradient leaves the stage earlier. Else rows are as they are known, and those without a whole backward are
            left out.
    """
    placement, many = instance.placement, instance.microbatches
    ranks = placement.num_ranks
    chunks = placement.num_stages // ranks
    for generator in GENERATORS.values():
        if (generator.chunked or generator.stages == chunks) and chunks * ranks == placement.num_stages:
            made = generator.make(ranks, many, chunks)
            yield from _fitting(instance, made, halves)
    if halves and placement == Placement.linear(ranks):
        yield from _fitting(instance, zero_bubble("zb", ranks, many, max(ranks, int(instance.limits.max()))), halves)


def _fitting(instance: Instance, schedule: Schedule, halves: bool) -> Iterator[list[Codes]]:
    """The schedule's rows, in halves or as they are, if it fits."""
    if schedule.placement != instance.placement:
        return
    if not halves and not any((row.kinds == Kind.B).any() for row in schedule.rows):
        return
    rows = [in_halves(row.codes) if halves else row.codes for row in schedule.rows]
    if all(fits(row, limit) for row, limit in zip(rows, instance.limits.tolist(), strict=True)):
        yield rows


def in_halves(row: Codes) -> Codes:
    """The row with I and W in place of every B."""
    whole = row >> KIND_SHIFT & KIND_MASK == Kind.B
    halves = np.repeat(row, np.where(whole, 2, 1))
    first = np.flatnonzero(whole) + np.arange(np.count_nonzero(whole))
    halves[first] += (Kind.I - Kind.B) << KIND_SHIFT
    halves[first + 1] += (Kind.W - Kind.B) << KIND_SHIFT
    return halves


def fits(row: Codes, limit: int) -> bool:
    """Whether a rank's row keeps no more activations than that."""
    return int(np.cumsum(live_changes(row)).max(initial=0)) <= limit
