"""Interleaved 1F1B: several stages a rank (Narayanan et al. 2021, arXiv 2104.04473, section 2.2)."""

from __future__ import annotations

import numpy as np

from pipert.scheduler.action import Kind
from pipert.scheduler.errors import LayoutError
from pipert.scheduler.generators.alternate import alternate
from pipert.scheduler.placement import Placement, positive
from pipert.scheduler.row import Codes, pack
from pipert.scheduler.schedule import Schedule


def interleaved(ranks: int, microbatches: int, chunks: int = 1, group: int | None = None) -> Schedule:
    """Each rank owns `chunks` stages, stage s on rank s modulo `ranks`, so the pipeline fills in shorter steps.

    2 ranks with 2 stages each, 4 micro-batches, a backward as long as two forwards; rank 0 has stages 0 and 2::

        rank 0 │F0F1F0F1F2··B0━━F3B1━━F2B0━━F3B1━━··B2━━··B3━━B2━━B3━━│
        rank 1 │··F0F1F0B0━━F1B1━━F2B0━━F3B1━━F2B2━━F3B3━━B2━━B3━━····│
                0                                                   27

    Micro-batches go in groups: a rank does the forwards of a whole group at its first stage, then at its second, and so
    on; backwards in the same groups, last stage first. Any number of micro-batches will do. Let p be the ranks, v the
    chunks, m the micro-batches, F and B a rank's time for one micro-batch at all its stages. The groups are of equal
    size p where p divides m, else of the nearly equal sizes of `group_sizes`, at least p, so that no rank waits between
    two chunks of a group. Then a rank idles

    * (p − 1)(F + B)/v for every m ≥ p, the least there can be with this placement,
    * (p − m)(F + B) + (m − 1)(F + B)/v for m < p,

    and rank r keeps at most (v − 1)g + 2(p − 1 − r) + 1 activations of one stage each, g the largest group: Megatron's
    figure where p divides m. With one chunk a rank this is 1F1B.

    Args:
        ranks: p.
        microbatches: m.
        chunks: v.
        group: micro-batches of a group, ≥ p, in place of the sizes above; the last group has what is left, which
            joins the first one if it is less than p. Larger groups need more memory.

    Raises:
        LayoutError: a number is below 1, or `group` below `ranks`.
    """
    placement = Placement.looped(ranks, chunks)
    sizes = group_sizes(ranks, microbatches) if group is None else _groups_of(group, ranks, microbatches)
    chunk, batch = _order(sizes, chunks)
    rows = []
    for rank in range(ranks):
        forwards = pack(chunk * ranks + rank, Kind.F, batch)
        backwards = pack((chunks - 1 - chunk) * ranks + rank, Kind.B, batch)
        behind = ranks - 1 - rank
        # Twice as far ahead as 1F1B: a message may then take as long as an action without holding anybody up.
        warmup = behind if chunks == 1 else (chunks - 1) * sizes[0] + 2 * behind
        rows.append(alternate(forwards, backwards, warmup))
    return Schedule("interleaved", placement, microbatches, tuple(rows))


def group_sizes(ranks: int, microbatches: int) -> list[int]:
    """Cut the micro-batches into as many groups of at least `ranks` as there can be, larger ones first.

    For 4 ranks: 8 → [4, 4], 9 → [5, 4], 7 → [7], 3 → [3].
    """
    groups = max(1, positive("microbatches", microbatches) // ranks)
    small, larger = divmod(microbatches, groups)
    return [small + 1] * larger + [small] * (groups - larger)


def _groups_of(size: int, ranks: int, microbatches: int) -> list[int]:
    """Cut the micro-batches into groups of a size."""
    if positive("group", size) < ranks:
        raise LayoutError(f"group = {size} is less than ranks = {ranks}: ranks would wait within it; use >= {ranks}")
    whole, rest = divmod(positive("microbatches", microbatches), size)
    if rest < ranks and whole:
        return [size + rest, *[size] * (whole - 1)]
    return [size] * whole + [rest] * (rest > 0)


def _order(sizes: list[int], chunks: int) -> tuple[Codes, Codes]:
    """Chunk and micro-batch of every forward: group by group, in a group chunk by chunk."""
    ends = np.cumsum(sizes)
    chunk = np.concatenate([np.repeat(np.arange(chunks), size) for size in sizes])
    batch = np.concatenate([np.tile(np.arange(end - size, end), chunks) for size, end in zip(sizes, ends, strict=True)])
    return chunk, batch
