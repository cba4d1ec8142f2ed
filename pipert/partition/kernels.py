"""Inner loops of the partitioner: plain Python on lists when small, the same functions compiled by numba when large.

Everything is an integer, so sums are exact and ties are ties. ``prefix[i]`` is the cost of blocks ``0 .. i-1``;
``reach[i]`` is one past the last block that a stage starting with block i may hold. Arguments that end the list are
buffers to work in and to answer in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol, cast

import numpy as np

INFINITE = 1 << 61
_SMALL = 20_000


class Ints(Protocol):
    """A list of ints or an int64 array."""

    def __getitem__(self, index: int, /) -> int: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...
    def __len__(self) -> int: ...


class Backend:
    """Where to run the kernels: in Python up to some work, compiled above (numba takes half a second to import)."""

    def __init__(self, work: int) -> None:
        self.compile = work > _SMALL

    def run(self, kernel: Callable[..., Any], *arguments: Any) -> Any:
        """Call a kernel of this module."""
        return (_compiled(kernel) if self.compile else kernel)(*arguments)

    def ints(self, values: Sequence[int] | np.ndarray[Any, Any]) -> Ints:
        """Values in the form the kernels want here."""
        array = np.asarray(values, dtype=np.int64)
        return cast(Ints, array if self.compile else array.tolist())

    def blank(self, length: int) -> Ints:
        """Zeros."""
        return cast(Ints, np.zeros(length, dtype=np.int64) if self.compile else [0] * length)


@lru_cache
def _compiled(kernel: Callable[..., Any]) -> Callable[..., Any]:
    import numba

    return cast(Callable[..., Any], numba.njit(cache=True)(kernel))


def cost_reach(prefix: Ints, bound: int, reach: Ints) -> None:
    """How far a stage from each block on gets within a cost bound."""
    j = 0
    for i in range(len(prefix) - 1):
        while j + 1 < len(prefix) and prefix[j + 1] - prefix[i] <= bound:
            j += 1
        reach[i] = j


def memory_reach(
    own: Ints, kept: Ints, first: Ints, group: Ints, size: Ints, in_flight: int, limit: int, count: Ints, reach: Ints
) -> None:
    """How far a stage from each block on gets within a memory limit.

    ``own``: bytes of a block's untied state; ``kept``: bytes of one micro-batch's activations. Block i uses the tied
    groups ``group[first[i]:first[i + 1]]``, of which group g takes ``size[g]`` bytes once per stage.
    """
    j = 0
    used = 0  # and every count is zero, here and at the end
    for i in range(len(own)):
        j = max(j, i)
        while j < len(own):
            more = own[j] + in_flight * kept[j]
            for k in range(first[j], first[j + 1]):
                if count[group[k]] == 0:
                    more += size[group[k]]
            if used + more > limit:
                break
            used += more
            for k in range(first[j], first[j + 1]):
                count[group[k]] += 1
            j += 1
        reach[i] = j
        if j > i:
            used -= own[i] + in_flight * kept[i]
            for k in range(first[i], first[i + 1]):
                count[group[k]] -= 1
                if count[group[k]] == 0:
                    used -= size[group[k]]


def probe(prefix: Ints, cap: Ints, stages: int, bound: int) -> tuple[bool, int]:
    """Whether stages filled one after another up to the bound hold all blocks.

    Returns:
        True and the heaviest stage; or False and the least larger bound at which anything changes (`INFINITE`: none).
    """
    n = len(prefix) - 1
    heaviest = 0
    larger = INFINITE
    i = 0
    for _ in range(stages):
        low = i
        high = cap[i]
        while low < high:
            middle = (low + high + 1) // 2
            if prefix[middle] - prefix[i] <= bound:
                low = middle
            else:
                high = middle - 1
        if low < cap[i]:
            larger = min(larger, prefix[low + 1] - prefix[i])
        if low == i:
            return False, larger
        heaviest = max(heaviest, prefix[low] - prefix[i])
        i = low
        if i == n:
            return True, heaviest
    return False, larger


def layered_probe(
    prefix: Ints, near: Ints, rows: Ints, which: Ints, ends: Ints, first: Ints, last: Ints, cuts: Ints
) -> tuple[bool, int]:
    """`probe` where every stage has a reach of its own (row ``which[s]`` of ``rows``) and none may be empty.

    Afterwards, where it fits, ``first[s] .. last[s]`` are the blocks that stage s may start with, as far as
    ``ends[s * (blocks + 1) + i]`` is 1: stages s.. can hold exactly the blocks i.. .
    """
    n = len(prefix) - 1
    stages = len(which)
    last[0] = 0
    for s in range(stages):
        last[s + 1] = min(near[last[s]], rows[which[s] * n + last[s]], n - (stages - s - 1))
        if s + 1 < stages and last[s + 1] >= n:
            last[s + 1] = n - 1
    if last[stages] < n:
        return False, 0
    ends[stages * (n + 1) + n] = 1
    first[stages] = n
    for s in range(stages - 1, -1, -1):
        here = s * (n + 1)
        above = here + n + 1
        bottom = first[s + 1]
        top = last[s + 1]
        i = min(last[s], top - 1)
        after = max(i + 1, bottom)
        while not ends[above + after]:
            after += 1
        first[s] = n + 1
        last[s] = -1
        while i >= 0:
            if bottom <= i + 1 <= top and ends[above + i + 1]:
                after = i + 1
            furthest = min(near[i], rows[which[s] * n + i])
            if furthest < bottom:
                break
            ends[here + i] = 1 if after <= furthest else 0
            if after <= furthest:
                first[s] = i
                last[s] = max(last[s], i)
            i -= 1
        if last[s] < 0:
            return False, 0
    if first[0] > 0:
        return False, 0
    heaviest = 0
    i = 0
    for s in range(stages):
        j = min(near[i], rows[which[s] * n + i], last[s + 1])
        while not ends[(s + 1) * (n + 1) + j]:
            j -= 1
        heaviest = max(heaviest, prefix[j] - prefix[i])
        i = j
        cuts[s + 1] = j
    return True, heaviest


def best_suffixes(
    prefix: Ints, cap: Ints, back: Ints, price: int, most: bool, value: Ints, count: Ints, queue: Ints, since: Ints
) -> None:
    """The least sum of squared stage costs plus ``price`` per stage, for every suffix of the blocks.

    ``value[i]`` is for blocks i.., ``count[i]`` the fewest (or ``most``) stages that reach it. Squares of sums satisfy
    the quadrangle inequality, so the best next cut only moves one way: each candidate cut in ``queue`` is best from
    index ``since`` downwards until the next candidate takes over (Galil & Park 1992, "Dynamic programming with
    convexity, concavity and sparsity"). ``back[j]`` is the first block whose stage may reach j.
    """
    n = len(prefix) - 1
    value[n] = 0
    count[n] = 0
    head = 0
    tail = 0
    for i in range(n - 1, -1, -1):
        new = i + 1
        place = i
        while tail > head:
            old = queue[tail - 1]
            at = min(since[tail - 1], i)
            low = back[old] - 1  # from here down the older candidate is out of reach
            high = at + 1
            while high - low > 1:
                middle = (low + high) // 2
                if high == at + 1:
                    middle = at
                a = (prefix[new] - prefix[middle]) ** 2 + value[new]
                b = (prefix[old] - prefix[middle]) ** 2 + value[old]
                fits = count[new] >= count[old] if most else count[new] <= count[old]
                if a < b or (a == b and fits):
                    low = middle
                else:
                    high = middle
            if low >= at:
                tail -= 1
            else:
                place = low
                break
        if place >= 0:
            queue[tail] = new
            since[tail] = place
            tail += 1
        while tail - head > 1 and since[head + 1] >= i:
            head += 1
        j = queue[head]
        value[i] = (prefix[j] - prefix[i]) ** 2 + value[j] + price
        count[i] = count[j] + 1


def pick(prefix: Ints, cap: Ints, price: int, value: Ints, fewest: Ints, most: Ints, cuts: Ints) -> None:
    """Follow best suffixes with exactly ``len(cuts) - 1`` stages, each as long as it can be.

    Every number of stages between a suffix's fewest and most is possible (by the quadrangle inequality).
    """
    stages = len(cuts) - 1
    i = 0
    for s in range(stages):
        left = stages - s - 1
        j = cap[i]
        while value[i] != (prefix[j] - prefix[i]) ** 2 + value[j] + price or fewest[j] > left or most[j] < left:
            j -= 1
        i = j
        cuts[s + 1] = j


def layered_spread(
    prefix: Ints,
    near: Ints,
    rows: Ints,
    which: Ints,
    first: Ints,
    last: Ints,
    offset: Ints,
    value: Ints,
    before: Ints,
    choice: Ints,
    stack: Ints,
    cuts: Ints,
) -> None:
    """Least sum of squared stage costs where every stage has a reach of its own and none may be empty.

    One layer per stage from the last to the first; within a layer the best cut moves one way (Monge), so the middle
    block's best cut halves the search for the others. Of equal ones the longest stage wins. ``first`` and ``last`` are
    from `layered_probe`; the choice of stage s starting with block i stands at ``offset[s] + i - first[s]``.
    """
    n = len(prefix) - 1
    stages = len(which)
    before[n] = 0
    for s in range(stages - 1, -1, -1):
        stack[0], stack[1], stack[2], stack[3] = first[s], last[s], first[s + 1], last[s + 1]
        top = 4
        while top:
            top -= 4
            low, high, left, right = stack[top], stack[top + 1], stack[top + 2], stack[top + 3]
            if low > high:
                continue
            i = (low + high) // 2
            best = INFINITE
            at = -1
            for j in range(max(left, i + 1), min(right, near[i], rows[which[s] * n + i]) + 1):
                if before[j] < INFINITE:
                    total = (prefix[j] - prefix[i]) ** 2 + before[j]
                    if total <= best:
                        best = total
                        at = j
            value[i] = best
            choice[offset[s] + i - first[s]] = at
            stack[top], stack[top + 1], stack[top + 2], stack[top + 3] = low, i - 1, left, at if at >= 0 else right
            stack[top + 4], stack[top + 5] = i + 1, high
            stack[top + 6], stack[top + 7] = at if at >= 0 else left, right
            top += 8
        for i in range(first[s], last[s] + 1):
            before[i] = value[i]
    i = 0
    for s in range(stages):
        i = choice[offset[s] + i - first[s]]
        cuts[s + 1] = i
