"""ZB-V: two stages a rank, down the ranks and up again (Qi et al. 2024, arXiv 2401.10241, section 6)."""

from __future__ import annotations

from pipert.scheduler.generators.fill import fill_weights
from pipert.scheduler.generators.pattern import F0, F1, I0, I1, numbered
from pipert.scheduler.placement import Placement, positive
from pipert.scheduler.row import Codes
from pipert.scheduler.schedule import Schedule


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """No bubble where F, I and W take the same time, with the memory of 1F1B's first rank.

    3 ranks, 6 micro-batches, F, I and W as long as one another::

        rank 0 │F0F1F2F3F4F0I0W0F1I1W1F2I2W2F5I0W0F3I3W3I1W1F4I4W4I2W2F5I5I3W5I4W3I5W4W5····│
        rank 1 │··F0F1F2F0F3F1I0W0F2I1W1F4I0W0F3I2W2F5I1W1F4I3W3I2W2F5I4I3I5I4W4I5W3W5W4W5··│
        rank 2 │····F0F0F1F1F2F2I0W0F3I0W0F3I1W1F4I1W1F4I2W2F5I2W2F5I3I3I4I4I5I5W3W3W4W4W5W5│
                0                                                                         38

    Rank r of p owns the stages r and 2p − 1 − r, so the loss is on rank 0 and backwards start early. Weight gradients
    W fill what idle time is left. With m ≥ 2p − 1 micro-batches and equal times of F, I and W no rank idles
    between its own first and last action (the ranks start one after the other and end likewise), and none keeps
    more than 2p activations of one stage each, as much as p micro-batches through both of its stages.

    Raises:
        LayoutError: a number is below 1.
    """
    placement = Placement.v(ranks)
    rows = [_order(rank, ranks, positive("microbatches", microbatches)) for rank in range(ranks)]
    return Schedule("zb-v", placement, microbatches, fill_weights(placement, microbatches, rows, limit=2 * ranks))


def _order(rank: int, ranks: int, microbatches: int) -> Codes:
    """The F and I of one rank, for as many micro-batches as the warm-up takes at least."""
    count = max(microbatches, 2 * ranks - 1)
    behind = ranks - 1 - rank
    pattern = [
        ([F0], 2 * behind + 1),
        ([F1, F0], rank),
        ([F1, I1], behind + 1),
        ([F0, I0, F1, I1], count - ranks - behind),
        ([I0, F1, I1], behind),
        ([I0, I1], rank),
        ([I0], behind + 1),
    ]
    return numbered((rank, 2 * ranks - 1 - rank), pattern, microbatches)
