"""DualPipeV: DeepSeek's DualPipe folded into a V (arXiv 2412.19437; order of github.com/deepseek-ai/DualPipe)."""

from __future__ import annotations

from pipert.scheduler.action import Kind
from pipert.scheduler.generators.pattern import B0, B1, F0, F1, I0, I1, W1, Step, numbered
from pipert.scheduler.placement import Placement, positive
from pipert.scheduler.row import ActionRow, Codes
from pipert.scheduler.schedule import Schedule


def dual_pipe_v(ranks: int, microbatches: int) -> Schedule:
    """A forward of one direction beside a backward of the other, so that one's messages hide behind the other's work.

    2 ranks, 4 micro-batches, F, I and W as long as one another::

        rank 0 │F0─F1─F2─F0─I0═W0~F1─F3─B1━━━━F2─B0━━━━B2━━━━F3─···B1━━━━B3━━━━I2═W2~I3═W3~│
        rank 1 │···F0─F0─F1─F1─F2─B0━━━━F2─B0━━━━F3─B1━━━━F3─B1━━━━B2━━━━B2━━━━I3═I3═W3~W3~│
                0                                                                        25

    Rank r of p owns the stages r and 2p − 1 − r. In the steady phase it does F of its first stage with B of its second,
    then F of its second with B of its first; an engine that can may run such a pair together, here one follows the
    other. Backwards are split only at the ends, where their weight gradients W fill idle time. No rank keeps more than
    2p + 1 activations of one stage each, about as much as p + 1 micro-batches through both of its stages. The
    order is made for m ≥ 2p micro-batches; for fewer it is that of 2p without those that are not there.

    Raises:
        LayoutError: a number is below 1.
    """
    placement = Placement.v(ranks)
    rows = [_order(rank, ranks, positive("microbatches", microbatches)) for rank in range(ranks)]
    return Schedule("dual-pipe-v", placement, microbatches, tuple(map(ActionRow.from_codes, rows)))


def _order(rank: int, ranks: int, microbatches: int) -> Codes:
    """The row of one rank."""
    count = max(microbatches, 2 * ranks)
    behind = ranks - 1 - rank
    pattern = [
        ([F0], 2 * behind),
        ([F0, F1], rank + 1),
        ([I1, W1, F1], behind),
        ([F0, B1, F1, B0], count - ranks - behind),
        ([B1, F1, B0], behind),
        (_cool_down(rank, behind), 1),
    ]
    return numbered((rank, 2 * ranks - 1 - rank), pattern, microbatches)


def _cool_down(rank: int, behind: int) -> list[Step]:
    """The last backwards: whole ones, then halves, whose weight gradients follow where the rank would wait."""
    turns = [1, 0] * (rank + 1)
    whole, halves = turns[: rank + 1], turns[rank + 1 :]
    weights = [(chunk, Kind.W) for chunk in [*halves, *[0] * behind]]
    return [
        *[(chunk, Kind.B) for chunk in whole],
        *[(chunk, Kind.I) for chunk in halves],
        *[step for weight in weights[:behind] for step in (weight, I0)],
        *weights[behind:],
    ]
