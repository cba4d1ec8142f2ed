"""A rank's row written as a pattern: steps without micro-batches, each so many times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from pipert.scheduler.action import Kind
from pipert.scheduler.row import Codes, pack

#: An action without its micro-batch: which of the rank's stages (0, 1, …), and what it does.
Step = tuple[int, Kind]

F0, F1, B0, B1, I0, I1, W0, W1 = ((stage, kind) for kind in (Kind.F, Kind.B, Kind.I, Kind.W) for stage in (0, 1))


def numbered(stages: Sequence[int], pattern: Iterable[tuple[Sequence[Step], int]], microbatches: int) -> Codes:
    """Give the steps their micro-batches: every stage counts its forwards, input and weight gradients from 0.

    Args:
        stages: the rank's stages.
        pattern: steps, and how many times they are done one after the other.
        microbatches: steps for this micro-batch and later ones are left out. (What is left of a schedule that is right
            is right.)

    Returns:
        The packed actions.
    """
    parts = [np.tile(np.array(steps, dtype=np.int64).reshape(-1, 2), (times, 1)) for steps, times in pattern]
    chunk, kind = np.concatenate(parts).T
    number = np.zeros_like(kind)
    for half in (Kind.F, Kind.I, Kind.W):
        counts = (kind == half) | ((kind == Kind.B) & (half != Kind.F))
        for own in range(len(stages)):
            here = counts & (chunk == own)
            number[here] = np.arange(np.count_nonzero(here))
    keep = number < microbatches
    return pack(np.asarray(stages)[chunk[keep]], kind[keep], number[keep])
