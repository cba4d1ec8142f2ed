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
    return _one_f_one_b("1f1b", ranks, microbatches, ahead=1)


def eager_one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """1F1B with about twice as many forwards at the start (Zhuang et al. 2023, arXiv 2211.05322).

    4 ranks, 8 micro-batches, a backward as long as two forwards::

        rank 0 │F0F1F2F3F4F5F6······B0━━F7B1━━··B2━━··B3━━··B4━━··B5━━··B6━━··B7━━│
        rank 1 │··F0F1F2F3F4····B0━━F5B1━━F6B2━━F7B3━━··B4━━··B5━━··B6━━··B7━━····│
        rank 2 │····F0F1F2··B0━━F3B1━━F4B2━━F5B3━━F6B4━━F7B5━━··B6━━··B7━━········│
        rank 3 │······F0B0━━F1B1━━F2B2━━F3B3━━F4B4━━F5B5━━F6B6━━F7B7━━············│
                0                                                               33

    In the steady phase each message then has the time of a forward and a backward before anybody needs it, where 1F1B
    waits for it on each way: messages no longer than F cost nothing there. With p ranks and m micro-batches, rank r
    keeps the activations of min(m, 2(p − r) − 1) micro-batches; a rank idles (p − 1)(F + B) if F ≤ B and messages take
    no time.

    Raises:
        LayoutError: a number is below 1.
    """
    return _one_f_one_b("1f1b-eager", ranks, microbatches, ahead=2)


def _one_f_one_b(name: str, ranks: int, microbatches: int, ahead: int) -> Schedule:
    """Warm up with `ahead` forwards for each rank behind this one."""
    placement = Placement.linear(ranks)
    batches = np.arange(positive("microbatches", microbatches))
    rows = (
        alternate(pack(rank, Kind.F, batches), pack(rank, Kind.B, batches), warmup=ahead * (ranks - 1 - rank))
        for rank in range(ranks)
    )
    return Schedule(name, placement, microbatches, tuple(rows))
