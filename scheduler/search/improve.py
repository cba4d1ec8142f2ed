"""Local search: rows made faster by `tabu`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipert.scheduler.compiled import compiled
from pipert.scheduler.instance import Instance
from pipert.scheduler.row import Codes
from pipert.scheduler.search.tabu import MOST_MOVES, tabu
from pipert.scheduler.worklist import Ints, Seconds


@dataclass(frozen=True, eq=False)
class Graph:
    """What must follow what, apart from the order on each rank, for actions numbered ``(kind·S + stage)·m + batch``.

    Attributes:
        seconds: of every action ``[actions]``.
        before: the one action of another stage or kind that it waits for, or −1.
        behind: the one that waits for it, or −1.
        lags: seconds of the hand-over from `before`.
    """

    seconds: Seconds
    before: Ints
    behind: Ints
    lags: Seconds

    @classmethod
    def of(cls, instance: Instance) -> Graph:
        """The relations of an instance: the way of each micro-batch up and down."""
        size, many = instance.num_stages, instance.microbatches
        number = np.arange(3 * size * many).reshape(3, size, many)
        before, behind = np.full_like(number, -1), np.full_like(number, -1)
        lags = np.zeros(number.shape)
        before[0, 1:], behind[0, :-1] = number[0, :-1], number[0, 1:]
        before[1, :-1], behind[1, 1:] = number[1, 1:], number[1, :-1]
        before[1, -1], behind[0, -1] = number[0, -1], number[1, -1]
        lags[0, 1:] = instance.hops[:-1, None]
        lags[1, :-1] = instance.hops[:-1, None]
        each = np.concatenate([instance.forward, instance.inputs, instance.weights])
        return cls(np.repeat(each, many), before.ravel(), behind.ravel(), lags.ravel())


def improve(
    instance: Instance, rows: list[Codes], *, seed: int, effort: int, bound: float
) -> tuple[list[Codes], float]:
    """Make rows faster.

    Args:
        instance: the work.
        rows: of every rank, packed; they can run and keep the ranks' memory, and so will the answer.
        seed: the same one gives the same answer.
        effort: how many actions to visit.
        bound: a makespan that is good enough.

    Returns:
        The rows and their makespan.
    """
    size, many = instance.num_stages, instance.microbatches
    graph = Graph.of(instance)
    codes = np.concatenate(rows)
    numbers = _numbers(codes, size, many)
    count, offsets = len(codes), np.cumsum([0, *map(len, rows)])
    best = np.array([np.inf])
    compiled(tabu, effort)(
        *(offsets, instance.limits, numbers, best, size, many),
        *(graph.seconds, graph.before, graph.behind, graph.lags, np.tile(instance.owners.repeat(many), 3)),
        *(max(8, min(MOST_MOVES, effort // (20 * count))), seed & 0x7FFFFFFF, effort, bound),
        *(np.zeros(count, dtype=np.int64) for _ in range(7)),
        *(np.zeros(2 * MOST_MOVES, dtype=np.int64), np.zeros(count)),
        *(np.zeros(3 * len(rows), dtype=np.int64), np.zeros(len(rows))),
    )
    kind, stage, batch = numbers // (size * many), numbers // many % size, numbers % many
    codes = stage << 36 | kind + (kind > 0) << 28 | batch
    return np.split(codes, offsets[1:-1]), float(best[0])


def _numbers(codes: Codes, size: int, many: int) -> Ints:
    """The numbers of packed actions in a `Graph`."""
    kind = codes >> 28 & 255
    numbers: Ints = ((kind - (kind > 0)) * size + (codes >> 36)) * many + (codes & 268435455)
    return numbers
