"""The row shape that most schedules share: forwards first, then forward and backward in turn, then backwards."""

from __future__ import annotations

import numpy as np

from pipert.scheduler.row import ActionRow, Codes


def alternate(forwards: Codes, backwards: Codes, warmup: int) -> ActionRow:
    """Merge the forwards and backwards of one rank.

    Args:
        forwards: packed forwards in order, int64 ``[n]``.
        backwards: packed backwards in order, int64 ``[n]``.
        warmup: how many forwards come first (all of them if there are fewer).

    Returns:
        `warmup` forwards, then pairs of the next forward and the next backward, then the backwards left. So at most
        ``warmup + 1`` forwards are ahead of their backwards.
    """
    count = len(forwards)
    warmup = min(warmup, count)
    row = np.empty(2 * count, dtype=np.int64)
    steady = row[warmup : 2 * count - warmup]
    row[:warmup] = forwards[:warmup]
    steady[0::2] = forwards[warmup:]
    steady[1::2] = backwards[: count - warmup]
    row[2 * count - warmup :] = backwards[count - warmup :]
    row.flags.writeable = False
    return ActionRow.from_codes(row)
