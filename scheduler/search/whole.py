"""Put halves of backwards together again where nobody gains by having them apart."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from pipert.scheduler.action import Action, Kind
from pipert.scheduler.costs import Costs
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.simulate import simulate


def whole(schedule: Schedule, costs: Costs) -> Schedule:
    """The schedule with B in place of I and W where they stand one behind the other and the gradient is not hurried.

    A whole backward takes a runtime a little less than two halves, but hands its gradient on only at its end. So they
    are put together where the previous stage does nothing with the gradient before that::

        before   1I0 1W0~          after   1B0━━━━
                     0I0 0W0~ ...                0I0 0W0~ ...      no: stage 0 would begin later
        before   1I0 1W0~          after   1B0━━━━
                         0B0━━━━                 0B0━━━━           yes

    The times of all other actions stay as they are, if a whole backward takes no longer than its halves.

    Args:
        schedule: any.
        costs: the times by which to judge.
    """
    table, placement = costs.table(schedule.num_stages), schedule.placement
    slack = 1e-9 * float(table.max(initial=0.0))
    timeline = simulate(schedule, costs)
    begins = {action: start for _, action, start, _ in timeline if action.kind in (Kind.I, Kind.B)}
    ends = {action: end for _, action, _, end in timeline if action.kind is Kind.W}

    def hurried(stage: int, microbatch: int) -> bool:
        """Whether the previous stage begins before the whole backward could be over."""
        if not stage:
            return False
        used = [begins.get(Action(stage - 1, kind, microbatch), np.inf) for kind in (Kind.I, Kind.B)]
        hop = 0.0 if placement.is_local(stage - 1) else float(table[Kind.SEND_B, stage])
        return min(used) < ends[Action(stage, Kind.W, microbatch)] + hop - slack

    def joined(row: list[Action]) -> list[Action]:
        result, skip = [], False
        for action, following in pairwise([*row, None]):
            assert action is not None
            if skip:
                skip = False
                continue
            skip = (
                action.kind is Kind.I
                and following == action._replace(kind=Kind.W)
                and not hurried(action.stage, action.microbatch)
            )
            result.append(action._replace(kind=Kind.B) if skip else action)
        return result

    rows = [joined(list(row)) for row in schedule.rows]
    return Schedule.of(schedule.name, placement, schedule.microbatches, rows)
