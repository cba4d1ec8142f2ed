"""Lower bounds: how fast any order of a schedule's work can be.

`makespan_bound` is about the actions of one schedule or program, `lower_bound` about all schedules of some work within
a memory.
"""

from __future__ import annotations

import numpy as np

from pipert.scheduler.action import Kind
from pipert.scheduler.compiled import compiled
from pipert.scheduler.costs import Costs
from pipert.scheduler.instance import Instance, Limits
from pipert.scheduler.placement import Placement
from pipert.scheduler.program import Program
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.worklist import Ints, Seconds


def makespan_bound(target: Schedule | Program, costs: Costs) -> float:
    """The least makespan that any order of the same computations on the same ranks can have, whatever its memory.

    No rank can begin before the first forward has come to its first stage, nor do its work in less than its sum; and
    where backwards are whole, its last one has still to go down to the first stage that is trained. Nor can a
    micro-batch go up and down the pipeline faster than by one action after the other.

    Args:
        target: a schedule that `verify` finds right, or one of forwards alone; or a program, which may run only a part
            of its schedule.
        costs: how long actions and hand-overs take.
    """
    stages, owners = target.num_stages, np.array(target.placement.owners)
    rows = [row.computations() for row in target.rows]
    table = costs.table(stages)
    there = np.zeros((len(Kind), stages), dtype=bool)
    for row in rows:
        there[row.kinds, row.stages] = True
    each = np.where(there, table, 0.0)
    hops = table[Kind.SEND_F, :-1] * (owners[:-1] != owners[1:])
    up, back = hops * there[Kind.F, 1:], hops * (there[Kind.B, :-1] | there[Kind.I, :-1])
    down = np.where(there[Kind.I], each[Kind.I], each[Kind.B])
    begins = np.append(0.0, np.cumsum(each[Kind.F, :-1] + up))  # when the first forward reaches each stage
    remains = np.append(0.0, np.cumsum(down[:-1] + back))  # from the end of a stage's backward to that of the first one
    lowest = int(np.argmax(there[Kind.B] | there[Kind.I]))  # the first stage that is trained
    path = begins[-1] + each[Kind.F, -1] + down[-1] + remains[-1] + each[Kind.W, lowest]
    work = np.array([table[row.kinds, row.stages].sum() for row in rows])
    firsts = [target.placement.stages_of(rank)[0] for rank in range(len(rows))]
    has_weights = [bool((row.kinds == Kind.W).any()) for row in rows]
    ranks = begins[firsts] + work + np.where(has_weights, 0.0, remains[firsts])
    return float(max(path, ranks.max()))


def lower_bound(costs: Costs, placement: Placement, microbatches: int, limits: Limits = None) -> float:
    """The least makespan that any schedule of this work can have, backwards in halves, within the ranks' memory.

    The largest of `rank_bound` over all ranks and `path_bound`. Micro-batches keep their order at every stage.

    Args:
        costs: how long F, I, W and hand-overs take.
        placement: the rank of every stage.
        microbatches: m.
        limits: the most (stage, micro-batch) pairs whose activations a rank may keep: one number, or one for each
            rank; None for no limit.

    Raises:
        LayoutError: a limit is too small for one micro-batch, or does not fit the ranks.
        CostError: the costs are for another number of stages.
    """
    return bound_of(Instance.of(costs, placement, microbatches, limits))


def bound_of(instance: Instance) -> float:
    """`lower_bound` of an instance."""
    ranks = range(instance.placement.num_ranks)
    return max(path_bound(instance), *(rank_bound(instance, rank) for rank in ranks))


def rank_bound(instance: Instance, rank: int) -> float:
    """What the work of one rank takes, with the time in which it cannot work.

    Let t be when the first I of the rank can begin at the earliest, after the way of one micro-batch to the loss and
    back. Before t the rank does nothing but forwards: none before the first one arrives, and at most as many as its
    memory holds, k. All its other work is done after t. At its end there are only weight gradients, or the last I with
    the way of its micro-batch down to stage 0; and by then all but k weight gradients are done, since the last F found
    room. So the makespan is at least t − (forwards before t) + the larger of

    * all work,
    * all F and I, all W but the k longest, and the shortest way down from one of its stages.

    With equal times and k = p this is 1F1B's bubble at the first rank, less what weight gradients can fill.
    """
    stages = list(instance.placement.stages_of(rank))
    many, keeps = instance.microbatches, int(instance.limits[rank])
    head, back, down = _ways(instance)
    turn = float(back[stages].min())
    early = min(turn - float(head[stages[0]]), _largest(instance.forward[stages], many, keeps))
    weights = many * float(instance.weights[stages].sum())
    rest = many * float((instance.forward[stages] + instance.inputs[stages]).sum())
    late = weights - _largest(instance.weights[stages], many, keeps) + float(down[stages].min())
    return turn - early + rest + max(weights, late)


def _largest(seconds: Seconds, times: int, count: int) -> float:
    """The sum of the `count` largest, where each is there `times` times."""
    return float(np.sort(np.repeat(seconds, times))[::-1][:count].sum())


def _ways(instance: Instance) -> tuple[Seconds, Seconds, Seconds]:
    """For each stage: when its first F can begin, when its first I can, and the least time from an I's end to the end.

    The way down from stage s: the I of the stages below with their hand-overs, and the W of any of them.
    """
    f, i, w, hops = instance.forward, instance.inputs, instance.weights, instance.hops
    head = np.append(0.0, np.cumsum(f[:-1] + hops[:-1]))
    above = np.cumsum((i[1:] + hops[:-1])[::-1])[::-1]
    back = head[-1] + f[-1] + np.append(above, 0.0)
    down = w.copy()
    for stage in range(1, len(down)):
        down[stage] = max(w[stage], hops[stage - 1] + i[stage - 1] + down[stage - 1])
    return head, back, down


def path_bound(instance: Instance) -> float:
    """The longest path through all that must follow one another, with the work that must lie between. O(actions).

    Earliest starts, in the order of the micro-batches j and along their way, as the largest of

    * the way itself: F(s, j) after F(s − 1, j), I(s, j) after I(s + 1, j), with the hand-overs;
    * the order of micro-batches: F(s, j) after F(s, j − 1), I(s, j) after I(s, j − 1);
    * the memory k: F(s, j) after W(s, j − k), which comes after I(s, j − k). The cycle F(s, j) → I(s, j) → W(s, j) →
      F(s, j + k) makes it periodic: k micro-batches take at least F + I + W and the way from s to the loss and back;
    * the work of the stage so far. F(s, j) comes after F(s, 0 … j − 1) and I, W(s, 0 … j − k), of which k F can lie
      before the first I(s, 0) can begin; I(s, j) after F(s, 0 … j), I(s, 0 … j − 1) and W(s, 0 … j − k).

    And from each of them to the end: the work of its stage that comes after it (of I(s, j): I and W from j on, F from
    j + k on), or all of that but the last k W, and the way down from the stage.
    """
    head, back, down = _ways(instance)
    size, many = instance.num_stages, instance.microbatches
    longest, keeps = np.zeros(1), instance.limits[instance.owners]
    buffers = np.zeros(size * many), np.zeros(size * many)
    values = instance.forward, instance.inputs, instance.weights, instance.hops, head, back, down
    compiled(_longest_path, 8 * size * many)(size, many, keeps, *values, *buffers, longest)
    return float(longest[0])


def _longest_path(
    size: int,
    many: int,
    keeps: Ints,
    f: Seconds,
    i: Seconds,
    w: Seconds,
    hops: Seconds,
    head: Seconds,
    back: Seconds,
    down: Seconds,
    forwards: Seconds,
    inputs: Seconds,
    longest: Seconds,
) -> None:
    """Kernel of `path_bound`: earliest starts ``[stages * m]``, and the longest path."""
    most = 0.0
    for j in range(many):
        for s in range(size):
            k = keeps[s]
            start = head[s] + j * f[s]
            if s > 0:
                start = max(start, forwards[(s - 1) * many + j] + f[s - 1] + hops[s - 1])
            if j > 0:
                start = max(start, forwards[s * many + j - 1] + f[s])
            if j >= k:
                start = max(start, inputs[s * many + j - k] + i[s] + w[s])
                start = max(start, back[s] + (j - k) * f[s] + (j - k + 1) * (i[s] + w[s]))
            forwards[s * many + j] = start
            left = many - j
            most = max(most, start + left * (f[s] + i[s] + w[s]), start + left * (f[s] + i[s]) + down[s])
            most = max(most, start + left * (f[s] + i[s]) + max(left - k, 0) * w[s] + down[s])
        for s in range(size - 1, -1, -1):
            k = keeps[s]
            behind = max(j - k + 1, 0)
            start = max(back[s] + j * i[s] + behind * (f[s] + w[s]), forwards[s * many + j] + f[s])
            if s < size - 1:
                start = max(start, inputs[(s + 1) * many + j] + i[s + 1] + hops[s])
            if j > 0:
                start = max(start, inputs[s * many + j - 1] + i[s])
            inputs[s * many + j] = start
            left = many - j
            fresh = max(left - k, 0)
            most = max(most, start + left * (i[s] + w[s]) + fresh * f[s])
            most = max(most, start + left * i[s] + fresh * (f[s] + w[s]) + down[s])
    longest[0] = most
