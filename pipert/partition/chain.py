"""Cut a row of blocks into stages, exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import frexp, fsum, isfinite
from numbers import Integral, Real
from typing import Any

import numpy as np

from pipert.errors import PartitionError
from pipert.partition.kernels import (
    Backend,
    best_suffixes,
    cost_reach,
    layered_probe,
    layered_spread,
    pick,
    probe,
)

Array = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class Reach:
    """How many blocks limits let a stage hold.

    Attributes:
        rows: ``rows[r][i]`` is one past the last block of a stage that starts with block i.
        which: the row of each stage.
    """

    rows: Array
    which: tuple[int, ...]

    @classmethod
    def unlimited(cls, blocks: int, stages: int) -> Reach:
        """No limits."""
        return cls(np.full((1, blocks), blocks, dtype=np.int64), (0,) * stages)


def chain_cuts(costs: Sequence[float], stages: int, reach: Reach | None = None) -> list[int]:
    """Cut blocks in a row into stages: least bottleneck, no stage empty, then least spread.

    * The *bottleneck* is the largest sum of costs in a stage; it is least, exactly (parametric search over sums that
      occur: Pinar & Aykanat 2004, "Fast optimal load balancing algorithms for 1D partitioning").
    * The *spread* is the sum of squared differences between the stages' costs and their mean. Where all stages have
      equal limits it is least by a Lagrangian search over a price per stage (Aggarwal, Schieber & Tokuyama 1994,
      "Finding a minimum-weight k-link path in graphs with the concave Monge property"), O(blocks log blocks) per
      price; where limits differ by stage, by a dynamic program, O(stages blocks log blocks).
    * Of equal answers the one with the longest first stages: 5 equal blocks on 4 stages are 2, 1, 1, 1.

    Costs are rounded to 2^-52 of their sum, for the spread to about 2^-31 stages of the bottleneck.

    Args:
        costs: of each block, any unit, not negative.
        stages: how many, ``1 <= stages <= len(costs)``.
        reach: what limits allow.

    Returns:
        ``stages + 1`` places, from 0 to ``len(costs)``; stage s holds blocks ``cuts[s] .. cuts[s + 1] - 1``.

    Raises:
        PartitionError: more stages than blocks, a cost that is no cost, or limits that no cut keeps.
    """
    n = len(costs)
    check_stage_count(n, stages)
    bad = [i for i, c in enumerate(costs) if not _is_cost(c)]
    if bad:
        raise PartitionError(f"block {bad[0]} costs {costs[bad[0]]!r}; costs must be finite and not negative")
    reach = reach or Reach.unlimited(n, stages)
    weights = whole_numbers(costs)
    prefix = np.concatenate(([0], np.cumsum(weights)))
    equal = len(set(reach.which)) == 1
    back = Backend(n * (8 if equal else stages))
    if equal:
        cap = np.minimum(reach.rows[reach.which[0]], n)
        return _equal_limits(back, prefix, stages, cap)
    return _limits_by_stage(back, prefix, reach)


def check_stage_count(blocks: int, stages: int) -> None:
    """Refuse a number of stages that blocks cannot fill.

    Raises:
        PartitionError: it is no whole number from 1 to the number of blocks.
    """
    if not isinstance(stages, Integral) or isinstance(stages, bool):
        raise PartitionError(f"stages = {stages!r} must be a whole number; use ranks x chunks")
    if not 1 <= stages <= blocks:
        remedy = f"use ranks x chunks of 1 to {blocks}" if blocks else "there must be at least one block"
        raise PartitionError(f"{blocks} blocks on {stages} stages: every stage needs a block; {remedy}")


def _is_cost(cost: float) -> bool:
    """Whether it is a number that is finite as a float and not negative."""
    try:
        return isinstance(cost, (float, int, Real)) and isfinite(cost) and cost >= 0
    except OverflowError:  # an integer beyond all floats
        return False


def whole_numbers(costs: Sequence[float]) -> Array:
    """Costs as integers that keep their ratios and sum up to less than 2^52; exact where a power of two allows."""
    floats = np.asarray(costs, dtype=np.float64)
    scaled = np.ldexp(floats, -frexp(floats.max())[1])  # at most 1 each, so that no sum overflows
    return np.rint(np.ldexp(scaled, 51 - frexp(fsum(scaled))[1])).astype(np.int64)


def coarse(prefix: Array, near: Array, stages: int) -> Array:
    """Prefix sums rounded so far that sums of squares of stage costs, weighted by stages, stay below 2^62."""
    weights = np.diff(prefix)
    starts = np.arange(len(near))
    for shift in range(64):
        rounded = np.concatenate(([0], np.cumsum((weights + ((1 << shift) >> 1)) >> shift)))
        if (stages + 2) * int((rounded[near] - rounded[starts]).max()) < 1 << 31:
            return rounded
    raise AssertionError("a cost is at most 2^52")


def _equal_limits(back: Backend, prefix: Array, stages: int, cap: Array) -> list[int]:
    bound = _bottleneck(back, prefix, stages, cap)
    near = np.minimum(np.searchsorted(prefix, prefix[:-1] + bound, side="right") - 1, cap)
    return _spread(back, coarse(prefix, near, stages), near, stages)


def _bottleneck(back: Backend, prefix: Array, stages: int, cap: Array) -> int:
    """The least heaviest stage."""
    values, limit = back.ints(prefix), back.ints(cap)
    total, heaviest = int(prefix[-1]), int(np.diff(prefix).max())
    low = max(heaviest, -(-total // stages))
    high = low + heaviest
    fits, found = back.run(probe, values, limit, stages, high)
    if not fits:
        fits, found = back.run(probe, values, limit, stages, total)
    if not fits or int((cap - np.arange(len(cap))).min()) < 1:
        raise PartitionError(f"no cut into {stages} stages keeps the limits")
    high = int(found)
    while low < high:
        fits, found = back.run(probe, values, limit, stages, (low + high) // 2)
        low, high = (low, int(found)) if fits else (int(found), high)
    return high


def _spread(back: Backend, prefix: Array, near: Array, stages: int) -> list[int]:
    """The least sum of squares with exactly this many stages, by a price per stage that makes this many optimal."""
    n = len(near)
    values, cap = back.ints(prefix), back.ints(near)
    first = back.ints(np.searchsorted(near, np.arange(n + 1), side="left"))
    value, fewest, most, queue, since = (back.blank(n + 1) for _ in range(5))
    heaviest = int((prefix[near] - prefix[:-1]).max())
    low, high = -1, (stages + 1) * heaviest * heaviest // 4 + 2
    price = min((int(prefix[-1]) // stages) ** 2, high - 1)
    for turn in range(200):
        back.run(best_suffixes, values, cap, first, price, False, value, fewest, queue, since)
        if fewest[0] > stages:
            low, seen = price, fewest[0]
        else:
            back.run(best_suffixes, values, cap, first, price, True, value, most, queue, since)
            if most[0] >= stages:
                break
            high, seen = price, most[0]
        price = int(price * (seen / stages) ** 2)
        if not low < price < high or turn % 3 == 2:
            price = (low + high) // 2
    else:
        raise AssertionError("some whole price makes every number of stages optimal")
    cuts = back.blank(stages + 1)
    back.run(pick, values, cap, price, value, fewest, most, cuts)
    return [int(cuts[s]) for s in range(stages + 1)]


def _limits_by_stage(back: Backend, prefix: Array, reach: Reach) -> list[int]:
    """Both objectives where stages have limits of their own."""
    n, stages = reach.rows.shape[1], len(reach.which)
    rows, which, values = back.ints(reach.rows.ravel()), back.ints(reach.which), back.ints(prefix)
    first, last, cuts = (back.blank(stages + 1) for _ in range(3))
    ends, near = back.blank((stages + 1) * (n + 1)), back.blank(n)

    def fits(bound: int) -> tuple[bool, int]:
        back.run(cost_reach, values, bound, near)
        answer: tuple[bool, int] = back.run(layered_probe, values, near, rows, which, ends, first, last, cuts)
        return answer

    heaviest, total = int(np.diff(prefix).max()), int(prefix[-1])
    low = max(heaviest, -(-total // stages))
    good, high = fits(low + heaviest)
    if not good:
        good, high = fits(total)
    if not good:
        raise PartitionError(f"no cut into {stages} stages keeps the limits")
    while low < high:
        middle = (low + high) // 2
        good, found = fits(middle)
        low, high = (low, int(found)) if good else (middle + 1, high)
    fits(high)
    fine = back.ints(coarse(prefix, np.asarray(near, dtype=np.int64), stages))
    sizes = np.asarray(last, dtype=np.int64) - np.asarray(first, dtype=np.int64) + 1
    offset = back.ints(np.concatenate(([0], np.cumsum(sizes))))
    choice, stack, value, before = (back.blank(length) for length in (int(sizes.sum()), 512, n + 1, n + 1))
    back.run(layered_spread, fine, near, rows, which, first, last, offset, value, before, choice, stack, cuts)
    return [int(cuts[s]) for s in range(stages + 1)]
