"""V-Half and V-Min: pipeline parallelism with controllable memory (Qi et al. 2024, arXiv 2405.15362).

Both repeat one *building block*, the times at which a micro-batch is at every rank on its way down, up, back down and
back up the V, every six units of time: as long as F, I and W of a rank's two stages take. How long the block lasts at
a rank is how many activations it keeps. How fast the four passages go, in units a rank, makes the difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, product

import numpy as np

from pipert.scheduler.action import Kind
from pipert.scheduler.generators.fill import fill_weights
from pipert.scheduler.placement import Placement, positive
from pipert.scheduler.row import Codes, pack
from pipert.scheduler.schedule import Schedule

#: Units of time in which a rank computes one micro-batch: F, I and W of two stages.
PERIOD = 6

#: Units from one rank to the next on the way down (F), up (F), down again (I) and up again (I).
Pace = tuple[int, int, int, int]


def v_half(ranks: int, microbatches: int) -> Schedule:
    """Half the memory of 1F1B's first rank, half of its bubble.

    4 ranks, 6 micro-batches, F, I and W as long as one another::

        rank 0 │F0F1··········F0I0F2W0··F1I1F3W1··F2I2F4I0W2W0F3I3F5I1W3W1F4I4I2W4W2F5I5I3W5W3··I4W4I5W5│
        rank 1 │··F0F1······F0····I0F2F1W0··I1F3F2W1I0I2F4W0F3W2I1I3F5W1F4W3I2I4W2F5W4I3I5W3W5I4W4I5W5··│
        rank 2 │····F0····F0F1····F1I0F2W0··F2I1F3I0W1W0F3I2F4I1W2W1F4I3F5I2W3W2F5I4I3W4W3I5I4W5I5W4W5··│
        rank 3 │······F0F0····F1F1····I0F2F2I0W0I1F3W0F3I1W1I2F4W1F4I2W2I3F5W2F5I3W3I4I4W3W4I5I5W4W5W5··│
                0                                                                                     44

    Rank r of p owns the stages r and 2p − 1 − r. No rank keeps more than p + 2 activations of one stage each, as much
    as p/2 + 1 micro-batches through both of its stages. With equal times of F, I and W and m ≥ p micro-batches a rank
    idles for less than 3p of them (1F1B in the same units: 6(p − 1)).

    Raises:
        LayoutError: a number is below 1.
    """
    return _v_shape("v-half", ranks, microbatches, pace=(1, 2, 1, 2), limit=ranks + 2)


def v_min(ranks: int, microbatches: int) -> Schedule:
    """The least memory that keeps all ranks busy: a third of 1F1B's first rank.

    4 ranks, 6 micro-batches, F, I and W as long as one another::

        rank 0 │F0F1··········F0I0F2W0····F1I1I0W1F3W0F2I2I1W2F4W1F3I3I2W3F5W2F4I4I3W4W3··F5I5I4W5W4······I5W5│
        rank 1 │··F0········F0F1··I0W0··F1F2I0I1W0W1F2F3I1I2W1W2F3F4I2I3W2W3F4F5I3I4W3W4F5··I4I5W4W5····I5W5··│
        rank 2 │····F0····F0····F1··I0F1W0I0F2W0I1F2W1I1F3W1I2F3W2I2F4W2I3F4W3I3F5W3I4F5W4I4W4··I5W5··I5W5····│
        rank 3 │······F0F0········F1F1I0I0W0W0F2F2I1I1W1W1F3F3I2I2W2W2F4F4I3I3W3W3F5F5I4I4W4W4····I5I5W5W5····│
                0                                                                                           47

    Rank r of p owns the stages r and 2p − 1 − r. Nothing waits on its way, so a micro-batch is back after 4p units of
    time: no rank keeps more than 2⌊(p + 4)/3⌋ activations of one stage each, as much as ⌊(p + 4)/3⌋ micro-batches
    through both of its stages. With equal times of F, I and W and enough micro-batches a rank idles for about 4p of
    them (1F1B in the same units: 6(p − 1)).

    Raises:
        LayoutError: a number is below 1.
    """
    return _v_shape("v-min", ranks, microbatches, pace=(1, 1, 1, 1), limit=2 * ((ranks + 4) // 3))


def _v_shape(name: str, ranks: int, microbatches: int, pace: Pace, limit: int) -> Schedule:
    """Repeat the building block of a pace and fill its gaps with weight gradients."""
    placement = Placement.v(ranks)
    starts = PERIOD * np.arange(positive("microbatches", microbatches))
    rows = [_row(placement, rank, times, starts) for rank, times in enumerate(zip(*_block(ranks, pace), strict=True))]
    return Schedule(name, placement, microbatches, fill_weights(placement, microbatches, rows, limit))


def _row(placement: Placement, rank: int, times: tuple[int, ...], starts: Codes) -> Codes:
    """The F and I of one rank in the order of their times; those of micro-batch m start ``starts[m]`` later."""
    first, second = placement.stages_of(rank)
    passages = ((first, Kind.F), (second, Kind.F), (second, Kind.I), (first, Kind.I))
    codes = np.concatenate([pack(stage, kind, np.arange(len(starts))) for stage, kind in passages])
    return codes[np.argsort(np.concatenate([starts + time for time in times]), kind="stable")]


def _block(ranks: int, pace: Pace) -> tuple[tuple[int, ...], ...]:
    """When one micro-batch is at every rank: down, up, down again, up again, ``[4][ranks]``.

    At each turn it may wait, in all as little as lets the repeated block never claim a rank twice at one time.
    """
    for waits in sorted(product(range(PERIOD), repeat=3), key=lambda waits: (sum(waits), waits)):
        block = tuple(_passages(ranks, pace, waits))
        if all(len({time % PERIOD for time in at_rank}) == len(pace) for at_rank in zip(*block, strict=True)):
            return block
    raise AssertionError(f"the pace {pace} fits no repetition")


def _passages(ranks: int, pace: Pace, waits: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The times of the four passages; each begins one unit, and the wait, after the one before."""
    lengths = [step * (ranks - 1) for step in pace]
    begins = accumulate((length + 1 + wait for length, wait in zip(lengths, waits, strict=False)), initial=0)
    for turn, (begin, step) in enumerate(zip(begins, pace, strict=True)):
        times = tuple(begin + step * rank for rank in range(ranks))
        yield times if turn % 2 == 0 else times[::-1]
