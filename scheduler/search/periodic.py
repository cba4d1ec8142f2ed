"""Many micro-batches: the steady state of a schedule for fewer, repeated."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pipert.scheduler.instance import Instance
from pipert.scheduler.row import Codes
from pipert.scheduler.worklist import Ints, Seconds

#: Fewer micro-batches are left out in multiples of this, so that periods of 1, 2, 3, 4, 6 and 12 fit.
STRIDE = 12


def fewer(instance: Instance) -> int:
    """A number of micro-batches that has warm-up, cool-down and a steady state; the instance's own if it is small."""
    least = 2 * int(instance.limits.max()) + 2 * instance.num_stages + 2 * STRIDE
    least = min(least, 6 * instance.num_stages + 2 * STRIDE)
    return instance.microbatches - max(0, (instance.microbatches - least) // STRIDE) * STRIDE


def extend(instance: Instance, rows: list[Codes], begins: list[Seconds], more: int) -> list[Codes] | None:
    """Rows for `more` micro-batches in addition, by repeating what lies between two moments.

    At both, every stage has done as many F, I and W as at the other, and d each in addition, d a divisor of `more`. The
    moments cut every row where no action on one side needs one on the other that comes later; so what lies between
    may follow itself, needs nothing else, and keeps the same memory.

    Args:
        instance: what the rows are for.
        rows: of every rank, packed.
        begins: when each of their actions starts.
        more: how many micro-batches to add.

    Returns:
        The longer rows, with the fastest period that there is; None if there is none.
    """
    codes, starts = np.concatenate(rows), np.concatenate(begins)
    found = _period(_table(instance, codes, starts), more)
    if found is None:
        return None
    first, last, step = found
    return [_repeated(row, times, first, last, step, more) for row, times in zip(rows, begins, strict=True)]


def _table(instance: Instance, codes: Codes, starts: Seconds) -> Seconds:
    """When every F, I and W starts: ``[3 * stages, micro-batches]``, F of stage 0 first."""
    kind = codes >> 28 & 255
    row = (kind - (kind > 0)) * instance.num_stages + (codes >> 36)
    table = np.zeros((3 * instance.num_stages, instance.microbatches))
    table[row, codes & 268435455] = starts
    return table


def _period(table: Seconds, more: int) -> tuple[float, float, int] | None:
    """Two moments and the micro-batches between them; the moments are starts at stage 0."""
    moments = table[0]
    done: Ints = np.stack([np.searchsorted(times, moments) for times in table], axis=1)
    ahead: npt.NDArray[np.int64] = done - np.arange(len(moments))[:, None]
    same: dict[bytes, list[int]] = {}
    best: tuple[float, int, float, float] | None = None
    for here, state in enumerate(ahead):
        for before in same.setdefault(state.tobytes(), []):
            step = here - before
            if more % step == 0:
                rate = float(moments[here] - moments[before]) / step
                option = (rate, step, float(moments[before]), float(moments[here]))
                best = option if best is None else min(best, option)
        same[state.tobytes()].append(here)
    return None if best is None else (best[2], best[3], best[1])


def _repeated(row: Codes, times: Seconds, first: float, last: float, step: int, more: int) -> Codes:
    """One row with its part from `first` to `last` so many times more."""
    begin, end = int(np.searchsorted(times, first)), int(np.searchsorted(times, last))
    again = more // step
    shifts = np.repeat(np.arange(again + 1) * step, end - begin)
    return np.concatenate([row[:begin], np.tile(row[begin:end], again + 1) + shifts, row[end:] + more])
