"""Lower bounds: how fast any order of a schedule's work can be."""

from __future__ import annotations

import numpy as np

from pipert.scheduler.action import Kind
from pipert.scheduler.costs import Costs
from pipert.scheduler.schedule import Schedule


def makespan_bound(schedule: Schedule, costs: Costs) -> float:
    """The least makespan that any order of the same actions on the same ranks can have, whatever its memory.

    No rank can begin before the first forward has come to its first stage, nor do its work in less than its sum; and
    where backwards are whole, its last one has still to go down to stage 0. Nor can a micro-batch go up and down the
    pipeline faster than by one action after the other.

    Args:
        schedule: a schedule that `verify` finds right.
        costs: how long actions and hand-overs take.
    """
    stages, owners = schedule.num_stages, np.array(schedule.placement.owners)
    table = costs.table(stages)
    work, split = np.zeros(schedule.num_ranks), np.zeros(stages, dtype=bool)
    for rank, row in enumerate(schedule.rows):
        work[rank] = table[row.kinds, row.stages].sum()
        split[row.stages[row.kinds == Kind.W]] = True
    hops = table[Kind.SEND_F, :-1] * (owners[:-1] != owners[1:])
    down = np.where(split, table[Kind.I], table[Kind.B])
    begins = np.append(0.0, np.cumsum(table[Kind.F, :-1] + hops))  # when the first forward reaches each stage
    remains = np.append(0.0, np.cumsum(down[:-1] + hops))  # from the end of a stage's backward to that of stage 0
    path = begins[-1] + table[Kind.F, -1] + down[-1] + remains[-1] + (table[Kind.W, 0] if split[0] else 0.0)
    firsts = [schedule.placement.stages_of(rank)[0] for rank in range(schedule.num_ranks)]
    has_weights = [bool((row.kinds == Kind.W).any()) for row in schedule.rows]
    ranks = begins[firsts] + work + np.where(has_weights, 0.0, remains[firsts])
    return float(max(path, ranks.max()))
