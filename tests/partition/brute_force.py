"""Every partition there is, for comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from math import inf

from pipert.graph import ModelGraph
from pipert.partition import StageLimit


def chains(blocks: int, stages: int) -> Iterator[list[range]]:
    """All ways to cut a row into stages that are not empty."""
    for cuts in combinations(range(1, blocks), stages - 1):
        places = [0, *cuts, blocks]
        yield [range(places[s], places[s + 1]) for s in range(stages)]


def rank(costs: Sequence[float], assignment: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Bottleneck and spread."""
    sums = [sum(costs[i] for i in stage) for stage in assignment]
    mean = sum(sums) / len(sums)
    return max(sums), sum((s - mean) ** 2 for s in sums)


def keeps(graph: ModelGraph, assignment: Sequence[Sequence[int]], limits: Sequence[StageLimit]) -> bool:
    """Whether every stage keeps its limit."""
    for stage, limit in zip(assignment, limits, strict=True):
        if limit.blocks is not None and len(stage) > limit.blocks:
            return False
        if limit.memory is not None and taken(graph, stage, limit.in_flight) > limit.memory:
            return False
    return True


def taken(graph: ModelGraph, stage: Sequence[int], in_flight: int, state: int = 4) -> int:
    """Bytes of a stage, counted block by block and tied parameters once."""
    blocks = [graph.blocks[i] for i in stage]
    sizes = {p.identity: p.nbytes for b in blocks for p in b.parameters}
    kept = sum(in_flight * (b.activation_bytes or 0) + b.buffer_bytes for b in blocks)
    return state * sum(sizes.values()) + kept


def best(
    costs: Sequence[float],
    candidates: Iterator[list[range]] | Iterator[list[list[int]]],
    allowed: Callable[[Sequence[Sequence[int]]], bool],
) -> tuple[float, float]:
    """The least bottleneck, and the least spread at that bottleneck; infinite when nothing is allowed."""
    found = [rank(costs, c) for c in candidates if allowed(c)]
    bottleneck = min((b for b, _ in found), default=inf)
    return bottleneck, min((s for b, s in found if b <= bottleneck * (1 + 1e-12)), default=inf)


def dags(graph: ModelGraph, stages: int) -> Iterator[list[list[int]]]:
    """All assignments of blocks to stages, none empty, with every edge running forward or staying."""
    edges = [(graph.index[e.source], graph.index[e.target]) for e in graph.edges]
    for places in product(range(stages), repeat=len(graph.blocks)):
        if len(set(places)) == stages and all(places[a] <= places[b] for a, b in edges):
            yield [[i for i, place in enumerate(places) if place == s] for s in range(stages)]
