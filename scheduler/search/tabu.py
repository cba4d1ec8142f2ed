"""Local search: move what the makespan hangs on within its rank (tabu search over the critical path).

The neighbourhood is that of job shops (Nowicki & Smutnicki 1996, "A fast taboo search algorithm for the job shop
problem"; Balas & Vazacopoulos 1998 for moves over more than one place): an action of a critical block, one that runs
without a gap on one rank, moves forwards or backwards within its block. Any other move cannot help.
"""

from __future__ import annotations

from pipert.scheduler.worklist import Ints, Seconds

#: The most moves that are tried before one is made.
MOST_MOVES = 256


def tabu(
    offsets: Ints,
    limits: Ints,
    best_rows: Ints,
    best: Seconds,
    size: int,
    many: int,
    seconds: Seconds,
    before: Ints,
    behind: Ints,
    lags: Seconds,
    owners: Ints,
    most: int,
    seed: int,
    effort: int,
    bound: float,
    rows: Ints,
    place: Ints,
    live: Ints,
    left_bars: Ints,
    right_bars: Ints,
    path: Ints,
    joined: Ints,
    moves: Ints,
    starts: Seconds,
    lanes: Ints,
    clocks: Seconds,
) -> None:
    """Kernel: rows in and out in ``best_rows``, their makespan out in ``best``; `rows` and on to work in.

    Each turn runs the rows, lists the moves that may help, tries them all, and makes the best one that is not barred:
    an action that has just moved one way may not move back for some turns, unless that gives the best rows so far.
    """
    count = len(best_rows)
    never = float("inf")
    rows[:] = best_rows[:]
    best[0] = never
    visits = 0
    turn = 0
    stall = 0  # turns since the best rows
    while visits < effort:
        span = _run(offsets, rows, seconds, before, behind, lags, owners, starts, lanes, clocks)
        visits += count
        if span < best[0]:
            best[0] = span
            stall = 0
            best_rows[:] = rows[:]
            if span <= bound:
                break
        else:
            stall += 1
        tries = 0
        if stall <= 300 and span < never:
            seed, length = _critical_path(
                offsets, rows, seconds, before, lags, owners, starts, span, seed, place, path, joined
            )
            _levels(offsets, rows, size * many, live)
            seed, tries = _list_moves(
                rows, before, owners, limits, live, path, joined, length, size, many, most, seed, moves
            )
        tries = min(tries, (effort - visits + count - 1) // count)
        seed, chosen = _best_move(
            *(offsets, rows, seconds, before, behind, lags, owners, starts, lanes, clocks),
            *(moves, tries, left_bars, right_bars, turn, best[0], seed),
        )
        visits += tries * count
        seed = _next(seed)
        if chosen >= 0:
            source = moves[2 * chosen]
            target = moves[2 * chosen + 1]
            moved = rows[source]
            _shift(rows, source, target)
            turn += 1
            if target < source:
                right_bars[moved] = turn + 6 + (seed >> 8) % 10
            else:
                left_bars[moved] = turn + 6 + (seed >> 8) % 10
        elif visits < effort:  # there is no way on from here: from the best rows, some steps at random
            rows[:] = best_rows[:]
            stall = 0
            seed = _shake(offsets, rows, before, owners, limits, size, many, 2 + (seed >> 8) % 16, seed)


def _best_move(
    offsets: Ints,
    rows: Ints,
    seconds: Seconds,
    before: Ints,
    behind: Ints,
    lags: Seconds,
    owners: Ints,
    starts: Seconds,
    lanes: Ints,
    clocks: Seconds,
    moves: Ints,
    tries: int,
    left_bars: Ints,
    right_bars: Ints,
    turn: int,
    best: float,
    seed: int,
) -> tuple[int, int]:
    """Try the moves one after the other.

    Returns:
        The next seed and the move with the least makespan, any of equal ones, that is not barred or better than the
        best; or −1.
    """
    chosen = -1
    chosen_span = float("inf")
    alike = 0
    for number in range(tries):
        source = moves[2 * number]
        target = moves[2 * number + 1]
        moved = rows[source]
        _shift(rows, source, target)
        span = _run(offsets, rows, seconds, before, behind, lags, owners, starts, lanes, clocks)
        _shift(rows, target, source)
        barred = (left_bars[moved] if target < source else right_bars[moved]) > turn
        if span == float("inf") or (barred and span >= best):
            continue
        if chosen < 0 or span < chosen_span:
            alike = 1
            chosen = number
            chosen_span = span
        elif span == chosen_span:
            alike += 1
            seed = _next(seed)
            if (seed >> 8) % alike == 0:
                chosen = number
    return seed, chosen


def _next(seed: int) -> int:
    """The next pseudo-random number; its higher bits are the better ones."""
    return (seed * 1103515245 + 12345) & 0x7FFFFFFF


def _shift(rows: Ints, source: int, target: int) -> None:
    """Move the action at one place to another, past all between them."""
    moved = rows[source]
    step = 1 if target > source else -1
    for at in range(source, target, step):
        rows[at] = rows[at + step]
    rows[target] = moved


def _run(
    offsets: Ints,
    rows: Ints,
    seconds: Seconds,
    before: Ints,
    behind: Ints,
    lags: Seconds,
    owners: Ints,
    starts: Seconds,
    lanes: Ints,
    clocks: Seconds,
) -> float:
    """Start every action as soon as what it waits for is done; the makespan, infinite if the rows hang.

    A rank goes on until it waits for another, which then wakes it. `lanes` holds for every rank the place where it is,
    what it waits for (or −1), and the stack of the ranks that can go on.
    """
    ranks = len(clocks)
    for action in range(len(starts)):
        starts[action] = -1.0
    for rank in range(ranks):
        lanes[rank] = offsets[rank]
        lanes[ranks + rank] = -1
        lanes[2 * ranks + rank] = ranks - 1 - rank
        clocks[rank] = 0.0
    able = ranks
    left = len(rows)
    span = 0.0
    while able > 0:
        able -= 1
        rank = lanes[2 * ranks + able]
        begin = lanes[rank]
        end = offsets[rank + 1]
        clock = clocks[rank]
        at = begin
        while at < end:
            action = rows[at]
            needed = before[action]
            if needed >= 0:
                if starts[needed] < 0.0:
                    lanes[ranks + rank] = needed
                    break
                clock = max(clock, starts[needed] + seconds[needed] + lags[action])
            starts[action] = clock
            clock += seconds[action]
            at += 1
            after = behind[action]
            if after >= 0 and lanes[ranks + owners[after]] == action:
                lanes[ranks + owners[after]] = -1
                lanes[2 * ranks + able] = owners[after]
                able += 1
        lanes[rank] = at
        left -= at - begin
        clocks[rank] = clock
        span = max(span, clock)
    return span if left == 0 else float("inf")


def _levels(offsets: Ints, rows: Ints, half: int, live: Ints) -> None:
    """How many activations a rank keeps after the action at every place."""
    for rank in range(len(offsets) - 1):
        level = 0
        for at in range(offsets[rank], offsets[rank + 1]):
            level += 1 if rows[at] < half else (-1 if rows[at] >= 2 * half else 0)
            live[at] = level


def _tied(u: int, v: int, size: int, many: int) -> bool:
    """Whether two actions keep their order whatever the times: of one stage, and of one kind or one micro-batch."""
    return u // many % size == v // many % size and (u // (size * many) == v // (size * many) or u % many == v % many)


def _shake(
    offsets: Ints,
    rows: Ints,
    before: Ints,
    owners: Ints,
    limits: Ints,
    size: int,
    many: int,
    times: int,
    seed: int,
) -> int:
    """Swap neighbours at random so many times, within the memory; the next seed."""
    half = size * many
    left = times
    for _ in range(1000 * times):  # there may be hardly any that can be swapped
        if left == 0:
            break
        seed = _next(seed)
        source = (seed >> 8) % len(rows)
        seed = _next(seed)
        rank = owners[rows[source]]
        target = source + (1 if seed >> 16 & 1 else -1)
        if target < offsets[rank] or target >= offsets[rank + 1]:
            continue
        first = min(source, target)
        u = rows[first]
        v = rows[first + 1]
        left -= 1
        if _tied(u, v, size, many) or before[v] == u:
            continue
        level = 0
        for at in range(offsets[rank], first):
            level += 1 if rows[at] < half else (-1 if rows[at] >= 2 * half else 0)
        if v < half and level + 1 > limits[rank]:
            continue
        rows[first] = v
        rows[first + 1] = u
    return seed


def _critical_path(
    offsets: Ints,
    rows: Ints,
    seconds: Seconds,
    before: Ints,
    lags: Seconds,
    owners: Ints,
    starts: Seconds,
    span: float,
    seed: int,
    place: Ints,
    path: Ints,
    joined: Ints,
) -> tuple[int, int]:
    """The places of one critical path, from its end, and whether each is in one block with the place before it.

    Returns:
        The next seed and the path's length.
    """
    for at in range(len(rows)):
        place[rows[at]] = at
    action = -1
    alike = 0
    for rank in range(len(offsets) - 1):
        final = rows[offsets[rank + 1] - 1]
        if starts[final] + seconds[final] == span:
            alike += 1
            seed = _next(seed)
            if (seed >> 8) % alike == 0:
                action = final
    length = 0
    while action >= 0:
        at = place[action]
        path[length] = at
        start = starts[action]
        left = -1
        if at > offsets[owners[action]]:
            left = rows[at - 1]
            if starts[left] + seconds[left] != start:
                left = -1
        other = before[action]
        if other >= 0 and starts[other] + seconds[other] + lags[action] != start:
            other = -1
        seed = _next(seed)
        if left >= 0 and (other < 0 or seed >> 16 & 1):
            joined[length] = 1
            action = left
        else:
            joined[length] = 0
            action = other
        length += 1
    return seed, length


def _list_moves(
    rows: Ints,
    before: Ints,
    owners: Ints,
    limits: Ints,
    live: Ints,
    path: Ints,
    joined: Ints,
    length: int,
    size: int,
    many: int,
    most: int,
    seed: int,
    moves: Ints,
) -> tuple[int, int]:
    """Moves of every action of a critical block within it, by one place and as far as may be: from where, to where.

    Returns:
        The next seed and the number of moves: all, or so many of them at random.
    """
    seen = 0
    high = 0
    for step_back in range(length):
        if step_back == 0 or joined[step_back - 1] == 0:
            high = path[step_back]
        low = path[step_back]
        if joined[step_back] == 1:
            continue
        for source in range(low, high + 1):
            for step in range(-1, 2, 2):
                end = low if step < 0 else high
                goal = _farthest(rows, before, limits[owners[rows[source]]], live, source, end, step, size, many)
                for which in range(2):
                    target = goal if which == 0 else source + step
                    if goal == source or (which == 1 and (target == goal or step > 0)):
                        continue
                    seen += 1
                    slot = seen - 1
                    if seen > most:
                        seed = _next(seed)
                        slot = (seed >> 8) % seen
                    if slot < most:
                        moves[2 * slot] = source
                        moves[2 * slot + 1] = target
    return seed, min(seen, most)


def _farthest(
    rows: Ints, before: Ints, limit: int, live: Ints, source: int, end: int, step: int, size: int, many: int
) -> int:
    """How far the action at a place may move towards the end of its block: what it is tied to, and memory, stop it."""
    v = rows[source]
    half = size * many
    target = source
    while target != end:
        u = rows[target + step]
        if _tied(u, v, size, many) or before[v] == u or before[u] == v:
            break
        if step < 0 and v < half and live[target - 1] + (1 if u >= 2 * half else 0) + 1 > limit:
            break
        if step > 0 and v >= 2 * half and live[target + 1] + 1 > limit:
            break
        target += step
    return target
