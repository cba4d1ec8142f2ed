"""Looped BFS: GPipe over several stages a rank (breadth-first, Lamy-Poirier 2023, arXiv 2211.05953)."""

from __future__ import annotations

import numpy as np

from pipert.scheduler.action import Kind
from pipert.scheduler.generators.alternate import alternate
from pipert.scheduler.placement import Placement, positive
from pipert.scheduler.row import pack
from pipert.scheduler.schedule import Schedule


def looped_bfs(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Each rank does all forwards stage by stage, then all backwards, last stage first.

    2 ranks with 2 stages each, 4 micro-batches, a backward as long as two forwards; rank 0 has stages 0 and 2::

        rank 0 │F0─F1─F2─F3─F0─F1─F2─F3─·········B0━━━━B1━━━━B2━━━━B3━━━━B0━━━━B1━━━━B2━━━━B3━━━━│
        rank 1 │···F0─F1─F2─F3─F0─F1─F2─F3─B0━━━━B1━━━━B2━━━━B3━━━━B0━━━━B1━━━━B2━━━━B3━━━━······│
                0                                                                              27

    Stage s is on rank s modulo `ranks`. A stage is done with one direction before the next stage begins, so that its
    weights are gathered and its gradients reduced once a step (with sharded weights) and these overlap the other
    stages' work. Let p be the ranks, v the chunks, m the micro-batches, F and B a rank's time for one micro-batch at
    all its stages. A rank idles (p − 1)(F + B)/v for m ≥ p, as in the interleaved schedule, but keeps all m · v
    activations of one stage each. With one chunk a rank this is GPipe.

    Raises:
        LayoutError: a number is below 1.
    """
    placement = Placement.looped(ranks, chunks)
    batch = np.tile(np.arange(positive("microbatches", microbatches)), chunks)
    chunk = np.repeat(np.arange(chunks), microbatches)
    rows = (
        alternate(
            pack(chunk * ranks + rank, Kind.F, batch),
            pack((chunks - 1 - chunk) * ranks + rank, Kind.B, batch),
            warmup=len(batch),
        )
        for rank in range(ranks)
    )
    return Schedule("looped-bfs", placement, microbatches, tuple(rows))
