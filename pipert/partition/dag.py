"""Cut a graph with branches into stages: exactly over its downsets while they are few, else by a stated heuristic.

A *downset* is a set of blocks that holds everything its blocks need. Stages of a pipeline only hand values forward, so
the stages 0 .. s together always form a downset, and a partition is a chain of downsets from nothing to everything
(Tarnawski et al. 2020, "Efficient algorithms for device placement of DNN graph operators").
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from pipert.errors import PartitionError
from pipert.graph.model_graph import INPUT, OUTPUT, ModelGraph
from pipert.partition.chain import chain_cuts, whole_numbers
from pipert.partition.kernels import INFINITE
from pipert.partition.limits import Memory, StageLimit

Matrix = np.ndarray[Any, np.dtype[np.int64]]

DOWNSET_CAP = 1500
"""Beyond this many downsets the heuristic decides (pairs of downsets are held as matrices: 1500 take about 0.2 GB)."""


def is_total_order(graph: ModelGraph) -> bool:
    """Whether every block feeds the next, so that there is one topological order and skip edges change nothing."""
    if graph.is_chain:
        return True
    pairs = {(e.source, e.target) for e in graph.edges}
    return all((a.name, b.name) in pairs for a, b in pairwise(graph.blocks))


def dag_cuts(
    graph: ModelGraph,
    costs: Sequence[float],
    stages: int,
    limits: Sequence[StageLimit],
    memory: Memory,
    cap: int = DOWNSET_CAP,
) -> tuple[list[list[str]], str]:
    """Assign blocks to stages so that every edge stays in its stage or runs forward; objectives as in `chain_cuts`.

    Up to ``cap`` downsets the answer is exact. Beyond, the heuristic: the model's own order, a depth-first order (a
    branch to its end before the next) and an order by longest remaining path are each cut exactly as a chain, and the
    best is taken.

    Args:
        graph: the model.
        costs: of each block.
        stages: how many.
        limits: one per stage.
        memory: how bytes add up.
        cap: the largest number of downsets to look at all of.

    Returns:
        Names of each stage's blocks, and the method in words.

    Raises:
        PartitionError: limits that no partition keeps.
    """
    sets = downsets(graph, cap)
    if sets is None:
        return _best_order(graph, costs, stages, limits, memory), f"best of 3 orders (more than {cap} downsets)"
    n = len(graph.blocks)
    members = np.array([[s >> i & 1 for i in range(n)] for s in sets], dtype=np.int64)
    return _exact(graph, members, costs, stages, limits, memory), f"exact over {len(sets)} downsets"


def downsets(graph: ModelGraph, cap: int) -> list[int] | None:
    """All downsets as bit masks, by size; None when there are more than ``cap``."""
    needs = [0] * len(graph.blocks)
    for edge in graph.edges:
        if edge.source != INPUT and edge.target != OUTPUT:
            needs[graph.index[edge.target]] |= 1 << graph.index[edge.source]
    found, layer = [0], {0}
    while layer:
        layer = {s | 1 << i for s in layer for i, need in enumerate(needs) if not s >> i & 1 and need & ~s == 0}
        found += sorted(layer)
        if len(found) > cap:
            return None
    return found


def _exact(
    graph: ModelGraph,
    members: Matrix,
    costs: Sequence[float],
    stages: int,
    limits: Sequence[StageLimit],
    memory: Memory,
) -> list[list[str]]:
    """Two dynamic programs over pairs of downsets, a layer per stage: least maximum, then least sum of squares."""
    inside = _inside(members)
    fits = {limit: inside & _within(graph, members, limit, memory) for limit in set(limits)}
    weight = members @ whole_numbers(costs)
    cost = weight[None, :] - weight[:, None]
    best = _start(len(members))
    for limit in limits:
        best = np.where(fits[limit], np.maximum(best[:, None], cost), INFINITE).min(axis=0)
    bound = int(best[-1])
    if bound >= INFINITE:
        raise PartitionError(f"no partition of {len(graph.blocks)} blocks into {stages} stages keeps the limits")
    shift = max(0, bound.bit_length() + (stages.bit_length() + 1) // 2 - 29)
    square = (members @ ((whole_numbers(costs) + ((1 << shift) >> 1)) >> shift)).astype(np.int64)
    squares = (square[None, :] - square[:, None]) ** 2
    total, choices = _start(len(members)), []
    for limit in limits:
        sums = np.where(fits[limit] & (cost <= bound), total[:, None] + squares, INFINITE)
        choices.append(len(members) - 1 - sums[::-1].argmin(axis=0))
        total = np.minimum(sums.min(axis=0), INFINITE)
    return _follow(graph, members, choices)


def _start(size: int) -> Matrix:
    """Before the first stage only the empty set is done."""
    best = np.full(size, INFINITE, dtype=np.int64)
    best[0] = 0
    return best


def _inside(members: Matrix) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which sets (rows) are proper subsets of which (columns)."""
    outside = (members.astype(np.float32) @ (1 - members.astype(np.float32)).T) > 0.5
    inside: np.ndarray[Any, np.dtype[np.bool_]] = ~outside
    np.fill_diagonal(inside, False)
    return inside


def _within(graph: ModelGraph, members: Matrix, limit: StageLimit, memory: Memory) -> Any:
    """Which differences of two sets a limit allows."""
    size = members.sum(axis=1)
    allowed = size[None, :] - size[:, None] <= (limit.blocks or len(graph.blocks))
    if limit.memory is None:
        return allowed
    used = members @ (memory.own + limit.in_flight * memory.kept)
    held = used[None, :] - used[:, None]
    for group, nbytes in zip(graph.tied, memory.shared, strict=True):
        count = members[:, [graph.index[name] for name in group.blocks]].sum(axis=1)
        held += nbytes * (count[None, :] > count[:, None])
    return allowed & (held <= limit.memory)


def _follow(graph: ModelGraph, members: Matrix, choices: Sequence[Matrix]) -> list[list[str]]:
    """The stages along the chosen downsets, from the full set back to the empty one."""
    at, assignment = len(members) - 1, []
    for choice in reversed(choices):
        before = int(choice[at])
        added = np.flatnonzero(members[at] - members[before])
        assignment.append([graph.blocks[i].name for i in added])
        at = before
    return assignment[::-1]


def _best_order(
    graph: ModelGraph, costs: Sequence[float], stages: int, limits: Sequence[StageLimit], memory: Memory
) -> list[list[str]]:
    found: list[tuple[float, float, list[list[str]]]] = []
    refusal: PartitionError | None = None
    for order in (range(len(graph.blocks)), _depth_first(graph), _longest_first(graph, costs)):
        names, ordered = [graph.blocks[i].name for i in order], [costs[i] for i in order]
        try:
            cuts = chain_cuts(ordered, stages, memory.reach(names, limits))
        except PartitionError as error:
            refusal = error
            continue
        sums = [sum(ordered[a:b]) for a, b in pairwise(cuts)]
        found.append((max(sums), sum(s * s for s in sums), [names[a:b] for a, b in pairwise(cuts)]))
    if not found:
        assert refusal is not None
        raise refusal
    return min(found, key=lambda item: item[:2])[2]


def _neighbours(graph: ModelGraph) -> list[list[int]]:
    after: list[list[int]] = [[] for _ in graph.blocks]
    for edge in graph.edges:
        if edge.source != INPUT and edge.target != OUTPUT:
            after[graph.index[edge.source]].append(graph.index[edge.target])
    return after


def _depth_first(graph: ModelGraph) -> list[int]:
    """Reverse post-order: once a branch is entered it is followed to where it joins."""
    after, done, order = _neighbours(graph), [False] * len(graph.blocks), list[int]()
    for root in reversed(range(len(graph.blocks))):
        stack = [(root, False)]
        while stack:
            i, finished = stack.pop()
            if finished:
                order.append(i)
            elif not done[i]:
                done[i] = True
                stack.append((i, True))
                stack += [(j, False) for j in after[i] if not done[j]]
    return order[::-1]


def _longest_first(graph: ModelGraph, costs: Sequence[float]) -> list[int]:
    """Of the blocks that are ready, the one with the longest way to the end comes first."""
    import heapq

    after = _neighbours(graph)
    way = [0.0] * len(costs)
    waiting = [0] * len(costs)
    for i in reversed(range(len(costs))):
        way[i] = costs[i] + max((way[j] for j in after[i]), default=0.0)
        for j in after[i]:
            waiting[j] += 1
    ready = [(-way[i], i) for i in range(len(costs)) if not waiting[i]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, i = heapq.heappop(ready)
        order.append(i)
        for j in after[i]:
            waiting[j] -= 1
            if not waiting[j]:
                heapq.heappush(ready, (-way[j], j))
    return order
