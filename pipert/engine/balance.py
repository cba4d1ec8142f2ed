"""Cuts by which ranks, not only stages, have equal work, and by which they wait less for each other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product

import numpy as np

from pipert.graph.model_graph import ModelGraph
from pipert.partition.partition import Partition
from pipert.scheduler.placement import Placement

#: The share by which the busiest rank must gain for a block to be moved.
_WORTH = 1e-3


def balanced_counts(graph: ModelGraph, partition: Partition, placement: Placement) -> tuple[int, ...]:
    """How many blocks each stage should have so that the busiest rank has little to do.

    The partitioner makes the heaviest stage light. Where a rank has several, equally good cuts may leave one rank with
    two heavy ones. So single blocks move from stage to stage, those between handing one on each, for as long as the
    busiest rank's work falls. With one stage a rank nothing is left to gain.

    Args:
        graph: with costs.
        partition: where to begin; in the graph's order.
        placement: the rank of every stage.
    """
    counts = np.array(partition.counts)
    if placement.num_stages == placement.num_ranks:
        return partition.counts
    costs = np.array([graph.blocks[graph.index[name]].cost or 0.0 for name in partition.order])
    sums, owners = np.concatenate([[0.0], np.cumsum(costs)]), np.array(placement.owners)

    def busiest(counts: np.ndarray[tuple[int], np.dtype[np.int64]]) -> float:
        ends = np.cumsum(counts)
        return float(np.bincount(owners, sums[ends] - sums[ends - counts]).max())

    best = busiest(counts)
    while True:
        moves = [(giver, taker) for giver, taker in permutations(range(len(counts)), 2) if counts[giver] > 1]
        tried = [(busiest(_moved(counts, *move)), move) for move in moves]
        least, move = min(tried, default=(best, (0, 0)))
        if least >= best * (1 - _WORTH):
            return tuple(counts.tolist())
        counts, best = _moved(counts, *move), least


def tilted_counts(partition: Partition, placement: Placement) -> Iterator[tuple[int, ...]]:
    """Other cuts that give ranks about as many blocks, where a rank's first stage is shorter and its last one longer.

    The first micro-batch then reaches the other ranks sooner, so they wait less; but a rank keeps its first stage's
    activations of more micro-batches. For the first rank alone and for all, by one block and by two.
    """
    ends = [(own[0], own[-1]) for own in map(placement.stages_of, range(placement.num_ranks)) if len(own) > 1]
    for blocks, pairs in product((1, 2), (ends[:1], ends)):
        counts = list(partition.counts)
        for first, last in pairs:
            counts[first] -= blocks
            counts[last] += blocks
        if ends and min(counts) >= 1:
            yield tuple(counts)


def _moved(
    counts: np.ndarray[tuple[int], np.dtype[np.int64]], giver: int, taker: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    moved = counts.copy()
    moved[giver] -= 1
    moved[taker] += 1
    return moved
