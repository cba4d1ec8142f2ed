"""Local search: move what the makespan hangs on within its rank (tabu search over the critical path).

The neighbourhood is that of job shops (Nowicki & Smutnicki 1996, "A fast taboo search algorithm for the job shop
problem"; Balas & Vazacopoulos 1998 for moves over more than one place): an action of a critical block, one that runs
without a gap on one rank, moves forwards or backwards within its block. Any other move cannot help.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipert.scheduler.compiled import compiled
from pipert.scheduler.instance import Instance
from pipert.scheduler.row import Codes
from pipert.scheduler.worklist import Ints, Seconds

#: The most moves that are tried before one is made.
MOST_MOVES = 256


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
    compiled(_improve, effort)(
        offsets,
        numbers,
        graph.seconds,
        graph.before,
        graph.behind,
        graph.lags,
        size,
        many,
        instance.limits,
        max(8, min(MOST_MOVES, effort // (20 * count))),
        seed & 0x7FFFFFFF,
        effort,
        bound,
        best,
        np.zeros(10 * count, dtype=np.int64),
        np.zeros(count),
        np.zeros(2 * MOST_MOVES, dtype=np.int64),
    )
    kind, stage, batch = numbers // (size * many), numbers // many % size, numbers % many
    codes = stage << 36 | kind + (kind > 0) << 28 | batch
    return np.split(codes, offsets[1:-1]), float(best[0])


def _numbers(codes: Codes, size: int, many: int) -> Ints:
    """The numbers of packed actions in a `Graph`."""
    kind = codes >> 28 & 255
    numbers: Ints = ((kind - (kind > 0)) * size + (codes >> 36)) * many + (codes & 268435455)
    return numbers


def _improve(  # noqa: C901, PLR0915
    offsets: Ints,
    best_rows: Ints,
    seconds: Seconds,
    before: Ints,
    behind: Ints,
    lags: Seconds,
    size: int,
    many: int,
    limits: Ints,
    most: int,
    seed: int,
    effort: int,
    bound: float,
    best: Seconds,
    work: Ints,
    times: Seconds,
    moves: Ints,
) -> None:
    """Kernel of `improve`: ``best_rows`` in and out, ``best`` out, the last three to work in."""
    count = len(best_rows)
    ranks = len(limits)
    half = size * many
    # `work` holds for every place of the rows: the action, its rank, the live pairs; for every action: its place, what
    # it waits for, the order of a run, until when it may not move to the left, to the right; the critical path.
    rank_of, live, place, waits, order, no_left, no_right, path, joined = (
        count * 1,
        count * 2,
        count * 3,
        count * 4,
        count * 5,
        count * 6,
        count * 7,
        count * 8,
        count * 9,
    )
    for rank in range(ranks):
        for at in range(offsets[rank], offsets[rank + 1]):
            work[rank_of + at] = rank
    for at in range(count):
        work[at] = best_rows[at]
    best[0] = float("inf")
    visits = 0
    turn = 0  # how many moves were made
    stall = 0
    tries = 0  # moves to try
    tried = 0
    chosen = -1
    chosen_span = 0.0
    alike = 0
    shake = 0
    while visits < effort:
        if shake > 0:  # a random move
            seed = (seed * 1103515245 + 12345) & 0x7FFFFFFF
            source = (seed >> 8) % count
            seed = (seed * 1103515245 + 12345) & 0x7FFFFFFF
            rank = work[rank_of + source]
            visits += 1
            target = source + (1 if seed >> 16 & 1 else -1)
            if target < offsets[rank] or target >= offsets[rank + 1]:
                continue
            first = min(source, target)
            u = work[first]
            v = work[first + 1]
            shake -= 1
            same = u // many % size == v // many % size and (u // half == v // half or u % many == v % many)
            if same or before[v] == u:
                continue
            level = 0
            for at in range(offsets[rank], first):
                level += 1 if work[at] < half else (-1 if work[at] >= 2 * half else 0)
            if v < half and level + 1 > limits[rank]:
                continue
            work[first] = v
            work[first + 1] = u
            continue
        trying = tried < tries
        source = 0
        target = 0
        if trying:
            source = moves[2 * tried]
            target = moves[2 * tried + 1]
            step = 1 if target > source else -1
            moved = work[source]
            for at in range(source, target, step):
                work[at] = work[at + step]
            work[target] = moved
        # Run the rows: every action once those that it waits for are done.
        for at in range(count):
            action = work[at]
            work[place + action] = at
            work[waits + action] = 0 if before[action] < 0 else 1
            times[action] = 0.0
        ready = 0
        for rank in range(ranks):
            for at in range(offsets[rank] + 1, offsets[rank + 1]):
                work[waits + work[at]] += 1
            action = work[offsets[rank]]
            if work[waits + action] == 0:
                work[order + ready] = action
                ready += 1
        span = 0.0
        at = 0
        while at < ready:
            action = work[order + at]
            at += 1
            end = times[action] + seconds[action]
            span = max(span, end)
            after = behind[action]
            if after >= 0:
                times[after] = max(times[after], end + lags[after])
                work[waits + after] -= 1
                if work[waits + after] == 0:
                    work[order + ready] = after
                    ready += 1
            where = work[place + action] + 1
            if where < offsets[work[rank_of + where - 1] + 1]:
                after = work[where]
                times[after] = max(times[after], end)
                work[waits + after] -= 1
                if work[waits + after] == 0:
                    work[order + ready] = after
                    ready += 1
        visits += count
        if ready < count:
            span = float("inf")
        if trying:
            moved = work[target]
            step = 1 if target > source else -1
            for at in range(target, source, -step):
                work[at] = work[at - step]
            work[source] = moved
            barred = work[(no_left if target < source else no_right) + moved] > turn
            if span < best[0] or (not barred and ready == count):
                better = chosen < 0 or span < chosen_span
                if not better and span == chosen_span:
                    alike += 1
                    seed = (seed * 1103515245 + 12345) & 0x7FFFFFFF
                    better = (seed >> 8) % alike == 0
                elif better:
                    alike = 1
                if better:
                    chosen = tried
                    chosen_span = span
            tried += 1
            if tried == tries:
                seed = (seed * 1103515245 + 12345) & 0x7FFFFFFF
                if chosen < 0:
                    stall = 1 << 30
                    tries = 0
                    tried = 0
                    continue
                source = moves[2 * chosen]
                target = moves[2 * chosen + 1]
                step = 1 if target > source else -1
                moved = work[source]
                for at in range(source, target, step):
                    work[at] = work[at + step]
                work[target] = moved
                turn += 1
                work[(no_right if target < source else no_left) + moved] = turn + 6 + (seed >> 8) % 10
                tries = 0
                tried = 0
            continue
        # Where the search stands now.
        if span < best[0]:
            best[0] = span
            stall = 0
            for at in range(count):
                best_rows[at] = work[at]
            if span <= bound:
                break
        else:
            stall += 1
        if stall > 300 or ready < count:
            for at in range(count):
                work[at] = best_rows[at]
            stall = 0
            seed = (seed * 1103515245 + 12345) & 0x7FFFFFFF
            shake = 2 + (seed >> 8) % 16
            continue
        # One critical path, from its end.
        action = -1
        alike = 0
        for rank in range(ranks):
            final = work[offsets[rank + 1] - 1]
            if times[final] + seconds[final] == span:
                alike += 1
                seed = (seed * 1103515245 + 12345) & 0x7FFFFFFF
                if (seed >> 8) % alike == 0:
                    action = final
        length = 0
        while action >= 0:
            work[path + length] = work[place + action]
            at = work[place + action]
            start = times[action]
            left = -1
            if at > offsets[work[rank_of + at]]:
                left = work[at - 1]
                if times[left] + seconds[left] != start:
                    left = -1
            other = before[action]
            if other >= 0 and times[other] + seconds[other] + lags[action] != start:
                other = -1
            seed = (seed * 1103515245 + 12345) & 0x7FFFFFFF
            if left >= 0 and (other < 0 or seed >> 16 & 1):
                work[joined + length] = 1  # one block with the place before
                action = left
            else:
                work[joined + length] = 0
                action = other
            length += 1
        for rank in range(ranks):
            level = 0
            for at in range(offsets[rank], offsets[rank + 1]):
                level += 1 if work[at] < half else (-1 if work[at] >= 2 * half else 0)
                work[live + at] = level
        # Moves of every action of a block to the left and to the right, by one place and as far as may be.
        seen = 0
        high = 0
        for step_back in range(length):
            if step_back == 0 or work[joined + step_back - 1] == 0:
                high = work[path + step_back]
            low = work[path + step_back]
            if work[joined + step_back] == 1:
                continue
            for source in range(low, high + 1):
                v = work[source]
                s = v // many % size
                rank = work[rank_of + source]
                for direction in range(2):
                    step = 2 * direction - 1
                    target = source
                    near = source + step
                    while (target > low) if step < 0 else (target < high):
                        u = work[target + step]
                        if u // many % size == s and (u // half == v // half or u % many == v % many):
                            break
                        if before[v] == u or before[u] == v:
                            break
                        if step < 0 and v < half:
                            before_u = work[live + target - 1] + (1 if u >= 2 * half else 0)
                            if before_u + 1 > limits[rank]:
                                break
                        if step > 0 and v >= 2 * half and work[live + target + 1] + 1 > limits[rank]:
                            break
                        target += step
                    for which in range(2):
                        goal = target if which == 0 else near
                        if target == source or (which == 1 and (goal == target or step > 0)):
                            continue
                        seen += 1
                        slot = tries
                        if tries >= most:
                            seed = (seed * 1103515245 + 12345) & 0x7FFFFFFF
                            slot = (seed >> 8) % seen
                        else:
                            tries += 1
                        if slot < most:
                            moves[2 * slot] = source
                            moves[2 * slot + 1] = goal
        chosen = -1
        alike = 0
        if tries == 0:
            stall = 1 << 30
