"""ZB-H1 and ZB-H2: 1F1B with the backward in two halves, one of them a filler (Qi et al. 2024, arXiv 2401.10241)."""

from __future__ import annotations

import numpy as np

from pipert.scheduler.action import Kind
from pipert.scheduler.generators.alternate import alternate
from pipert.scheduler.generators.fill import fill_weights
from pipert.scheduler.placement import Placement, positive
from pipert.scheduler.row import pack
from pipert.scheduler.schedule import Schedule


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """As much memory as 1F1B needs at its first rank, a third of its bubble.

    4 ranks, 8 micro-batches, F, I and W as long as one another::

        rank 0 │F0─F1─F2─F3─·········I0═W0~F4─I1═W1~F5─I2═W2~F6─I3═W3~F7─I4═W4~I5═W5~I6═W6~I7═W7~│
        rank 1 │···F0─F1─F2─······I0═F3─I1═W0~F4─I2═W1~F5─I3═W2~F6─I4═W3~F7─I5═W4~I6═W5~I7═W6~W7~│
        rank 2 │······F0─F1─···I0═F2─I1═F3─I2═W0~F4─I3═W1~F5─I4═W2~F6─I5═W3~F7─I6═W4~I7═W5~W6~W7~│
        rank 3 │·········F0─I0═F1─I1═F2─I2═F3─I3═W0~F4─I4═W1~F5─I5═W2~F6─I6═W3~F7─I7═W4~W5~W6~W7~│
                0                                                                              27

    Input gradients I go up the pipeline as early as in 1F1B, weight gradients W wait for idle time. With p ranks,
    m ≥ p micro-batches and times F, I and W (W ≤ F and W ≤ I), a rank idles (p − 1)(F + I − W) and keeps the
    activations of at most min(m, p) micro-batches.

    Raises:
        LayoutError: a number is below 1.
    """
    return zero_bubble("zb-h1", ranks, microbatches, limit=ranks)


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """About twice the memory of 1F1B, no bubble where F, I and W take the same time.

    4 ranks, 8 micro-batches, F, I and W as long as one another::

        rank 0 │F0─F1─F2─F3─F4─F5─F6─I0═W0~F7─I1═I2═W1~W2~I3═I4═W3~W4~I5═I6═W5~W6~I7═W7~·········│
        rank 1 │···F0─F1─F2─F3─F4─I0═F5─I1═F6─I2═W0~F7─I3═I4═W1~W2~I5═I6═W3~W4~I7═W5~W6~W7~······│
        rank 2 │······F0─F1─F2─I0═F3─I1═F4─I2═F5─I3═F6─I4═W0~F7─I5═I6═W1~W2~I7═W3~W4~W5~W6~W7~···│
        rank 3 │·········F0─I0═F1─I1═F2─I2═F3─I3═F4─I4═F5─I5═F6─I6═W0~F7─I7═W1~W2~W3~W4~W5~W6~W7~│
                0                                                                              27

    The ranks start one after the other and end one after the other: with p ranks, m ≥ 2p − 1 micro-batches and times
    F, I and W (W ≤ F and W ≤ I), a rank idles (p − 1)(F + I − 2W) from its own first action to its own last, so it
    gains over ZB-H1 where the next step may start rank by rank. It keeps the activations of at most min(m, 2p − 1)
    micro-batches.

    Raises:
        LayoutError: a number is below 1.
    """
    return zero_bubble("zb-h2", ranks, microbatches, limit=2 * ranks - 1)


def zero_bubble(name: str, ranks: int, microbatches: int, limit: int) -> Schedule:
    """The flat zero-bubble schedule for a given memory; ZB-H1 has ``limit = ranks``, ZB-H2 ``2 · ranks − 1``.

    Rank r of p warms up with one forward for each rank from itself on, as 1F1B does, and one more for each after it
    while the limit allows that: so the last rank, too, finds a weight gradient to do wherever it would wait.

    Args:
        name: of the schedule.
        ranks: p.
        microbatches: m.
        limit: the most micro-batches whose activations a rank may keep, ≥ `ranks` (taken as that if less).

    Raises:
        LayoutError: a number is below 1.
    """
    placement = Placement.linear(ranks)
    batches = np.arange(positive("microbatches", microbatches))
    spare = max(positive("limit", limit) - ranks, 0)
    rows = []
    for rank in range(ranks):
        behind = ranks - 1 - rank
        forwards, backwards = pack(rank, Kind.F, batches), pack(rank, Kind.I, batches)
        # Forward and backward in turn, the backward first: W makes room for the next forward between the two.
        rows.append(alternate(forwards, backwards, warmup=behind + min(spare, behind)).codes)
    return Schedule(name, placement, microbatches, fill_weights(placement, microbatches, rows, max(limit, ranks)))
