"""Pass on schedules: run every backward some forwards later."""

from __future__ import annotations

import numpy as np

from pipert.scheduler.action import Kind
from pipert.scheduler.errors import LayoutError
from pipert.scheduler.index import flatten
from pipert.scheduler.placement import is_whole
from pipert.scheduler.play import run_schedule
from pipert.scheduler.row import ActionRow, Codes
from pipert.scheduler.schedule import Schedule


def delay_backwards(schedule: Schedule, lag: int) -> Schedule:
    """The same with `lag` forwards more before every backward of every rank, where there are as many.

    ::

        1f1b, rank 0 of 2:  0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
        with a lag of 1:    0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3

    Between a forward of the last stage and its backward there is then time in which other ranks can compute their parts
    of the loss. Each rank keeps at most `lag` micro-batches more. Forwards keep their order, so do backwards. If some
    order of the schedule's own could not run so, a smaller lag is taken.

    Raises:
        LayoutError: `lag` is no integer >= 0.
    """
    if not is_whole(lag) or lag < 0:
        raise LayoutError(f"lag = {lag!r} must be an integer >= 0")
    for less in range(int(lag), 0, -1):
        rows = tuple(_delayed(row, less) for row in schedule.rows)
        later = Schedule(schedule.name, schedule.placement, schedule.microbatches, rows)
        if _runs(later):
            return later
    return schedule


def _delayed(row: ActionRow, lag: int) -> ActionRow:
    """Put a backward that has f forwards before it behind f + lag of them."""
    forward = row.kinds == Kind.F
    before = np.cumsum(forward)
    keys: Codes = np.where(forward, 2 * before, np.where(before > 0, 2 * (before + lag) + 1, 0))
    return ActionRow.from_codes(row.codes[np.argsort(keys, kind="stable")])


def _runs(schedule: Schedule) -> bool:
    codes, offsets = flatten(schedule.rows)
    nothing = np.zeros((len(Kind), schedule.num_stages))
    owners = np.array(schedule.placement.owners)
    return run_schedule(codes, offsets, owners, schedule.microbatches, nothing, nothing[0]).finished
