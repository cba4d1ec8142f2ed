"""GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965)."""

from __future__ import annotations

import numpy as np

from pipert.scheduler.action import Kind
from pipert.scheduler.generators.alternate import alternate
from pipert.scheduler.placement import Placement, positive
from pipert.scheduler.row import pack
from pipert.scheduler.schedule import Schedule


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """Every rank computes all forwards, then all backwards, both in the order of the micro-batches.

    4 ranks, 4 micro-batches, a backward as long as two forwards::

        rank 0 │F0F1F2F3··················B0━━B1━━B2━━B3━━│
        rank 1 │··F0F1F2F3············B0━━B1━━B2━━B3━━····│
        rank 2 │····F0F1F2F3······B0━━B1━━B2━━B3━━········│
        rank 3 │······F0F1F2F3B0━━B1━━B2━━B3━━············│
                0                                       21

    Backwards in the same order as forwards (not reversed) accumulate gradients as one process does. With p ranks, m
    micro-batches, and a forward and backward that take F and B everywhere, a rank idles (p − 1)(F + B) and keeps the
    activations of all m micro-batches.

    Raises:
        LayoutError: a number is below 1.
    """
    placement = Placement.linear(ranks)
    batches = np.arange(positive("microbatches", microbatches))
    rows = (
        alternate(pack(rank, Kind.F, batches), pack(rank, Kind.B, batches), warmup=microbatches)
        for rank in range(ranks)
    )
    return Schedule("gpipe", placement, microbatches, tuple(rows))
