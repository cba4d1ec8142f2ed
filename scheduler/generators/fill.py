"""Fill idle time with weight gradients: the step that all zero-bubble schedules share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipert.scheduler.action import KIND_MASK, KIND_SHIFT, Kind
from pipert.scheduler.compiled import compiled
from pipert.scheduler.placement import Placement
from pipert.scheduler.row import ActionRow, Codes

_NEVER = 1 << 60


def fill_weights(placement: Placement, microbatches: int, rows: Sequence[Codes], limit: int) -> tuple[ActionRow, ...]:
    """Add the weight-gradient half W of every backward to rows that have only F and I.

    A list-scheduling simulation in which F, I and W take one unit of time each. A rank does its next F or I as soon as
    it can; while it cannot it does the oldest W that it owes, so that the micro-batches of each stage keep their order.
    It cannot where the needs are not there, and an F also where it would exceed the limit.

    Args:
        placement: the rank of every stage.
        microbatches: how many.
        rows: for each rank its packed F and I in order, int64; they must not wait for one another in a cycle.
        limit: the most (stage, micro-batch) pairs of a rank that may be live, from F to W; more where a row cannot do
            with so few even if each W follows its I.
    """
    codes = np.concatenate(rows)
    offsets = np.cumsum([0, *map(len, rows)])
    made = np.full(2 * placement.num_stages * microbatches, _NEVER, dtype=np.int64)
    filled = np.zeros(len(codes) * 3 // 2, dtype=np.int64)
    limits = np.array([max(limit, _least(row)) for row in rows])
    compiled(_fill, len(filled))(offsets, codes, placement.num_stages, microbatches, limits, made, filled)
    filled.flags.writeable = False
    return tuple(map(ActionRow.from_codes, np.split(filled, offsets[1:-1] * 3 // 2)))


def _least(row: Codes) -> int:
    """The most pairs that are live if each W directly follows its I."""
    changes = np.where(row >> KIND_SHIFT & KIND_MASK == Kind.F, 1, -1)
    return int(np.cumsum(changes).max(initial=0))


def _fill(
    offsets: Codes, codes: Codes, stages: int, microbatches: int, limits: Codes, made: Codes, filled: Codes
) -> None:
    """Kernel of `fill_weights`: ``made`` holds the ends of every F, then of every I, by stage and micro-batch."""
    ranks = len(limits)
    half = stages * microbatches
    at = [offsets[rank] for rank in range(ranks)]  # the next F or I
    owed = [offsets[rank] for rank in range(ranks)]  # where to look for the next I without its W
    out = [offsets[rank] * 3 // 2 for rank in range(ranks)]
    live = [0] * ranks
    left = len(filled)
    now = 0
    while left > 0:
        for rank in range(ranks):
            act = -1
            if at[rank] < offsets[rank + 1]:
                code = codes[at[rank]]
                stage = code >> 36
                batch = code & 268435455
                place = stage * microbatches + batch
                if code >> 28 & 255 == 0:
                    if live[rank] < limits[rank] and (stage == 0 or made[place - microbatches] <= now):
                        act = code
                        made[place] = now + 1
                        live[rank] += 1
                elif made[place] <= now and (stage == stages - 1 or made[half + place + microbatches] <= now):
                    act = code
                    made[half + place] = now + 1
            if act >= 0:
                at[rank] += 1
            else:
                while owed[rank] < at[rank] and codes[owed[rank]] >> 28 & 255 == 0:
                    owed[rank] += 1
                if owed[rank] < at[rank]:
                    act = codes[owed[rank]] + (1 << 28)  # W is the kind behind I
                    owed[rank] += 1
                    live[rank] -= 1
            if act >= 0:
                filled[out[rank]] = act
                out[rank] += 1
                left -= 1
        now += 1
