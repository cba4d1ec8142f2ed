"""The two worklists that run a schedule or a program in time: kernels for `pipert.scheduler.compiled`.

Every action waits for *all* of a fixed set of events, so what happens does not depend on the order in which the ranks
are visited, and neither does the time at which it happens. A rank runs until it must wait for another; whoever
brings about the event it waits for puts it back on the list. Each action is visited once: O(actions).
The verifier asks only whether everything happens, the simulator when.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Positions = npt.NDArray[np.int32]
Seconds = npt.NDArray[np.float64]

#: ``ends`` of an operation that has not started.
WAITING = -2.0
#: ``ends`` of an operation that has started and is not complete.
STARTED = -1.0


def play_schedule(  # noqa: PLR0915
    offsets: Ints,
    codes: Ints,
    owners: Ints,
    needs: Ints,
    makes: Ints,
    microbatches: int,
    durations: Seconds,
    sending: Seconds,
    comm: Seconds,
    begins: Seconds,
    ends: Seconds,
    ready: Seconds,
    cursors: Ints,
    missing: Ints,
) -> None:
    """Run compute actions: each starts when its rank is free and its needs are there.

    Args:
        offsets: where each rank's row starts, ``[ranks + 1]``.
        codes: the packed actions, all compute and in range ``[actions]``.
        owners: the rank of every stage.
        needs: `needs_table()`, flat.
        makes: `makes_table()`, flat.
        microbatches: the number of micro-batches M.
        durations: seconds of an action, ``[kind * stages + stage]``.
        sending: seconds for which the rank is held after it, in the same order.
        comm: seconds of the hand-over between a stage and the next where they are on different ranks, ``[stages]``.
        begins: out, when each action starts ``[actions]``.
        ends: out, when it ends.
        ready: when each value is there, ``[(value kind * stages + stage) * M + micro-batch]``, −1 at first.
        cursors: the position each rank is at; out, the one it got to, ``offsets[1:]`` if all is well.
        missing: out, the value for which a rank waits, or −1.
    """
    stages = len(owners)
    values = len(makes) // 4
    clocks = [0.0] * len(cursors)
    first = [-1] * len(cursors)  # the ranks that wait for a value from this rank: a chain through `following`
    following = [-1] * len(cursors)
    todo = list(range(len(cursors) - 1, -1, -1))
    while len(todo) > 0:
        rank = todo.pop()
        clock = clocks[rank]
        i = cursors[rank]
        while i < offsets[rank + 1]:
            code = codes[i]
            stage = code >> 36
            kind = code >> 28 & 255
            microbatch = code & 268435455
            absent = -1
            maker = -1
            for need in range(4 * kind, 4 * kind + 4, 2):
                source = stage + needs[need + 1]
                if needs[need] < 0 or source < 0 or source >= stages:
                    continue
                value = (needs[need] * stages + source) * microbatches + microbatch
                there = ready[value]
                if there < 0.0:
                    absent = value
                    maker = owners[source]
                elif owners[source] == rank:
                    clock = max(clock, there)
                else:
                    clock = max(clock, there + comm[min(source, stage)])
            if absent >= 0:
                missing[rank] = absent
                following[rank] = first[maker]
                first[maker] = rank
                break
            begins[i] = clock
            clock += durations[kind * stages + stage]
            ends[i] = clock
            for value in range(values):
                if makes[values * kind + value] > 0:
                    ready[(value * stages + stage) * microbatches + microbatch] = clock
            clock += sending[kind * stages + stage]
            i += 1
        cursors[rank] = i
        clocks[rank] = clock
        waiter = first[rank]
        first[rank] = -1
        while waiter >= 0:
            after = following[waiter]
            if ready[missing[waiter]] >= 0.0:
                missing[waiter] = -1
                todo.append(waiter)
            else:
                following[waiter] = first[rank]
                first[rank] = waiter
            waiter = after


def play_program(  # noqa: C901, PLR0915
    offsets: Ints,
    codes: Ints,
    owners: Ints,
    needs: Positions,
    also: Positions,
    ring: Positions,
    unit: Positions,
    behind: Positions,
    pending: Positions,
    durations: Seconds,
    buffered: bool,
    blocking: bool,
    begins: Seconds,
    ends: Seconds,
    cursors: Ints,
    blocked: Ints,
) -> None:
    """Run a program by the rules of `pipert.scheduler.semantics.Semantics`.

    Args:
        offsets: where each rank's row starts, ``[ranks + 1]``.
        codes: the packed actions, all in range ``[actions]``.
        owners: the rank of every stage.
        needs: the operation of the same rank that must be complete before an action begins, or −1.
        also: other such operations, or −1: any number of rows one after another, ``[rows * actions]``.
        ring: the next of the operations that complete together (a message's other end, a collective's next member,
            itself if alone), −1 for compute.
        unit: the first operation of an action's group (itself without one); empty if there are no groups.
        behind: the unit that is queued behind an operation, or −1.
        pending: for each unit, at its first operation: 1 for its posting + the operations it is queued behind; once
            it has started, how many of its operations cannot be complete yet.
        durations: seconds of an action, ``[kind * stages + stage]``.
        buffered: whether a send completes without its receiver.
        blocking: whether messages and collectives hold the rank.
        begins: out, when a compute action or operation starts ``[actions]``, 0 at first.
        ends: out, when it is complete, `WAITING` at first.
        cursors: the position each rank is at; out, the one it got to.
        blocked: out, the operation for which a rank waits, or −1.
    """
    stages = len(owners)
    grouped = len(unit) > 0
    clocks = [0.0] * len(cursors)
    latest = [0.0] * len(codes)  # for each unit, at its first operation: when the latest of them could be complete
    drained = [0] * len(cursors)  # blocking: the operations before `drained` are complete,
    held = [0] * len(cursors)  # and those before `held` must be before the rank goes on
    startable = [0 for _ in range(0)]
    finished = [0 for _ in range(0)]
    todo = list(range(len(cursors) - 1, -1, -1))
    for rank in todo:
        drained[rank] = offsets[rank]
    while len(todo) > 0:
        rank = todo.pop()
        clock = clocks[rank]
        stop = offsets[rank + 1]
        i = cursors[rank]
        while True:
            while drained[rank] < held[rank] and ends[drained[rank]] >= 0.0:
                clock = max(clock, ends[drained[rank]])
                drained[rank] += 1
            if drained[rank] < held[rank]:
                blocked[rank] = drained[rank]
                break
            if i == stop:
                break
            if needs[i] >= 0:
                if ends[needs[i]] < 0.0:
                    blocked[rank] = needs[i]
                    break
                clock = max(clock, ends[needs[i]])
            for one in range(i, len(also), len(codes)):
                if also[one] >= 0:
                    if ends[also[one]] < 0.0:
                        blocked[rank] = also[one]
                        break
                    clock = max(clock, ends[also[one]])
            if blocked[rank] >= 0:
                break
            if ring[i] < 0:
                begins[i] = clock
                clock += durations[(codes[i] >> 28 & 255) * stages + (codes[i] >> 36)]
                ends[i] = clock
                i += 1
                continue
            start = unit[i] if grouped else i
            i += 1
            if grouped and i < stop and unit[i] == start:
                continue  # the group is posted with its last operation
            if blocking:
                held[rank] = i
            begins[start] = max(begins[start], clock)
            pending[start] -= 1
            if pending[start] == 0:
                startable.append(start)
            while len(startable) > 0:
                start = startable.pop()
                end = start + 1
                ends[start] = -1.0
                while grouped and end < len(codes) and unit[end] == start:
                    begins[end] = begins[start]
                    ends[end] = -1.0
                    end += 1
                pending[start] = end - start
                for one in range(start, end):
                    kind = codes[one] >> 28 & 255
                    if buffered and (kind == 4 or kind == 6 or kind == 8):
                        latest[start] = max(latest[start], begins[one])
                        pending[start] -= 1
                        if pending[start] == 0:
                            finished.append(start)
                    seconds = 0.0
                    over = 0.0
                    ready = 0.0
                    other = one
                    while ends[other] != -2.0:
                        kind = codes[other] >> 28 & 255
                        seconds = max(seconds, durations[kind * stages + (codes[other] >> 36)])
                        if buffered and (kind == 5 or kind == 7 or kind == 9):
                            ready = begins[other]  # the message has been on its way since it was sent
                        else:
                            over = max(over, begins[other])
                        other = ring[other]
                        if other == one:
                            break
                    if ends[other] == -2.0:
                        continue
                    over = max(over + seconds, ready)
                    while True:
                        kind = codes[other] >> 28 & 255
                        if not (buffered and (kind == 4 or kind == 6 or kind == 8)):
                            first = unit[other] if grouped else other
                            latest[first] = max(latest[first], over)
                            pending[first] -= 1
                            if pending[first] == 0:
                                finished.append(first)
                        other = ring[other]
                        if other == one:
                            break
                while len(finished) > 0:
                    first = finished.pop()
                    one = first
                    while one < len(codes) and (unit[one] if grouped else one) == first:
                        ends[one] = latest[first]
                        start = behind[one]
                        if start >= 0:
                            begins[start] = max(begins[start], ends[one])
                            pending[start] -= 1
                            if pending[start] == 0:
                                startable.append(start)
                        other = owners[codes[one] >> 36]
                        if blocked[other] == one:
                            blocked[other] = -1
                            todo.append(other)
                        one += 1
        cursors[rank] = i
        clocks[rank] = clock
