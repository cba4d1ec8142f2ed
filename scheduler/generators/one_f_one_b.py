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
