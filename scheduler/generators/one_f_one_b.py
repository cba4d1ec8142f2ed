"""1F1B: one forward, one backward (PipeDream-Flush, Narayanan et al. 2021, arXiv 2006.09503)."""

from __future__ import annotations

import numpy as np

from pipert.scheduler.action import Kind
from pipert.scheduler.generators.alternate import alternate
from pipert.scheduler.placement import Placement, positive
from pipert.scheduler.row import pack
from pipert.scheduler.schedule import Schedule


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Each rank starts its first backward as soon as there is one, then does forwards and backwards in turn.

    4 ranks, 8 micro-batches, a backward as long as two forwards::

        rank 0 │F0F1F2F3············B0━━F4B1━━F5B2━━F6B3━━F7B4━━··B5━━··B6━━··B7━━│
        rank 1 │··F0F1F2········B0━━F3B1━━F4B2━━F5B3━━F6B4━━F7B5━━··B6━━··B7━━····│
        rank 2 │····F0F1····B0━━F2B1━━F3B2━━F4B3━━F5B4━━F6B5━━F7B6━━··B7━━········│
        rank 3 │······F0B0━━F1B1━━F2B2━━F3B3━━F4B4━━F5B5━━F6B6━━F7B7━━············│
                0                                                               33

    With p ranks, m micro-batches, and a forward and backward that take F and B everywhere, a rank idles (p − 1)(F + B),
    as in GPipe, but rank r keeps the activations of only min(m, p − r) micro-batches.

    Raises:
        LayoutError: a number is below 1.
    """
    placement = Placement.linear(ranks)
    batches = np.arange(positive("microbatches", microbatches))
    rows = (
        alternate(pack(rank, Kind.F, batches), pack(rank, Kind.B, batches), warmup=ranks - 1 - rank)
        for rank in range(ranks)
    )
    return Schedule("1f1b", placement, microbatches, tuple(rows))
