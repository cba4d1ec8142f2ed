"""1F1B without its actions: a recurrence over micro-batches and ranks in O(ranks) memory.

Let u count the ranks from the last one, u = p − 1 − r. Rank u does F of micro-batch u + k and then B of micro-batch k,
for k = −u, …, m − 1, without what is not there. Its F waits for that of rank u + 1, its B for that of rank u − 1:

    F(u, k) starts at max(free(u, k − 1), F(u + 1, k − 1) + hop)
    B(u, k) starts at max(F(u, k),        B(u − 1, k)     + hop)

So all (u, k) of one *wave* t = 2k + u depend on the waves t − 1 and t − 2 alone, and a wave is one vector operation
over every other rank. The state between two waves is when each rank's last F and last B arrive at its neighbours.
"""

from __future__ import annotations

import math

import numpy as np

from pipert.scheduler.action import Kind
from pipert.scheduler.compiled import compiled
from pipert.scheduler.costs import Costs
from pipert.scheduler.placement import positive
from pipert.scheduler.summary import Summary
from pipert.scheduler.worklist import Ints

#: Times are whole numbers of ticks so short that no makespan has more of them than 2 to this power.
_BITS = 61


def simulate_1f1b(ranks: int, microbatches: int, costs: Costs, *, blocking: bool = False, jump: bool = True) -> Summary:
    """The figures of ``simulate(one_f_one_b(ranks, microbatches), costs)`` without making its actions.

    Times are counted in ticks of 2^-e seconds with the largest e that the makespan allows, so sums are exact, and the
    result is that of `simulate` to the last bit where the costs are whole numbers or binary fractions; else the two
    differ by the rounding of `simulate`.

    Once the whole state of the pipeline, relative to the time, is one that was there before, the steps between the two
    repeat until a rank runs out of forwards: they are jumped over. (It is not enough that the time grows equally from
    step to step: a queue that fills up behind a slow rank can look like that for long.)

    Args:
        ranks: p.
        microbatches: m.
        costs: how long F, B and hand-overs take at every stage.
        blocking: the rank that sends is held for ``costs.comm`` too.
        jump: whether to jump over repeated steps; the result is the same.

    Raises:
        LayoutError: a number is below 1.
        CostError: the costs are for another number of stages.
    """
    ranks, microbatches = positive("ranks", ranks), positive("microbatches", microbatches)
    table = costs.table(ranks)[:, ::-1]
    forward, backward = table[Kind.F], table[Kind.B]
    to_next, to_previous = table[Kind.SEND_F].copy(), table[Kind.SEND_B].copy()
    to_next[0] = to_previous[-1] = 0.0
    longest = float(forward.max() + backward.max() + 2 * (to_next.max() + to_previous.max()))
    exponent = _BITS - math.frexp(2.0 * (ranks + microbatches) * longest)[1]
    rows = (forward, backward, to_next, to_previous)
    ticks = [_by_parity(np.rint(np.ldexp(row, exponent)).astype(np.int64)) for row in rows]
    ends = _last_ends(ranks, microbatches, ticks, blocking, jump)
    firsts = np.append(0.0, np.cumsum((forward + to_next)[:0:-1]))
    busy = microbatches * (forward + backward)[::-1]
    lasts = np.ldexp(ends[::-1].astype(np.float64), -exponent)
    return Summary(
        "1f1b",
        2 * ranks * microbatches,
        float(lasts.max()),
        tuple(busy.tolist()),
        tuple((lasts - firsts - busy).tolist()),
        tuple(min(microbatches, ranks - rank) for rank in range(ranks)),
    )


def _places(ranks: int) -> Ints:
    """Where each u stands in an array that has the even ones before the odd ones, with a pad at every end."""
    each = np.arange(ranks)
    return each % 2 * (ranks // 2 + 2) + each // 2 + 1


def _by_parity(row: Ints) -> Ints:
    """Put the numbers of all ranks at their `_places`."""
    result = np.zeros(2 * (len(row) // 2 + 2), dtype=np.int64)
    result[_places(len(row))] = row
    return result


def _last_ends(ranks: int, microbatches: int, ticks: list[Ints], blocking: bool, jump: bool) -> Ints:
    """When the last B of each rank ends, in ticks, the last rank first."""
    forward, backward, to_next, to_previous = ticks
    held = to_next if blocking else np.zeros_like(to_next)
    free = np.zeros_like(to_next) if blocking else -to_previous
    real = np.tile(_by_parity(np.ones(ranks, dtype=np.int64)), 2)
    state, saved = np.zeros_like(real), np.zeros_like(real)
    kernel = compiled(_waves, 2 * ranks * microbatches, slices=True)
    kernel(ranks, microbatches, jump, forward, backward, to_next, to_previous, held, free, real, state, saved)
    ends: Ints = (state[len(forward) :] - to_previous)[_places(ranks)]
    return ends


def _waves(
    ranks: int,
    microbatches: int,
    jump: bool,
    forward: Ints,
    backward: Ints,
    to_next: Ints,
    to_previous: Ints,
    held: Ints,
    free: Ints,
    real: Ints,
    state: Ints,
    saved: Ints,
) -> None:
    """Kernel of `simulate_1f1b`; arrays are ``[size]`` in the order of `_places`, or ``[2 * size]``.

    Args:
        ranks: p.
        microbatches: m.
        jump: whether to look for a state that was there before.
        forward: ticks of F.
        backward: ticks of B.
        to_next: ticks of the hop of F.
        to_previous: ticks of the hop of B.
        held: ticks for which a rank is held after F.
        free: when a rank is free after B, relative to the arrival of B at its neighbour.
        real: 1 where `state` has a number, 0 at the pads, ``[2 * size]``.
        state: out, when each rank's last F arrives at its neighbour, then when its last B does, 0 at first.
        saved: room for an earlier state.
    """
    size = ranks // 2 * 2 + 4
    first, last = ranks - 1, 2 * microbatches - ranks  # of the waves in which each of their ranks does both, F and B
    wave, saved_at, suspect, patience = 1 - ranks, first, 0, 2
    while wave < 2 * microbatches + ranks - 2:
        odd = wave % 2
        at = odd * (size // 2) + 1
        near = (1 - odd) * (size // 2) + odd  # the other parity's first rank, of those the neighbours below
        count = (ranks + 1 - odd) // 2
        if wave < first or wave > last:
            for i in range(count):
                u = 2 * i + odd
                time = state[size + at + i] + free[at + i]
                if 0 <= wave + u < 2 * microbatches:
                    time = max(time, state[near + 1 + i]) + forward[at + i]
                    state[at + i] = time + to_next[at + i]
                    time += held[at + i]
                if 0 <= wave - u < 2 * microbatches:
                    time = max(time, state[size + near + i]) + backward[at + i]
                    state[size + at + i] = time + to_previous[at + i]
                else:
                    state[size + at + i] = time - free[at + i]
            wave += 1
            continue
        if jump and (wave - saved_at) % 2 == 0:
            grown = state[size + 1] - saved[size + 1]
            if state[suspect] - saved[suspect] == grown * real[suspect]:
                suspect = 0
                while suspect < 2 * size and state[suspect] - saved[suspect] == grown * real[suspect]:
                    suspect += 1
            if suspect == 2 * size and wave > saved_at:
                again = (last + 1 - wave) // (wave - saved_at)
                wave += again * (wave - saved_at)
                for j in range(2 * size):
                    state[j] += again * grown * real[j]
                jump = False
                continue
            suspect = min(suspect, 2 * size - 1)
            if wave == saved_at or wave - saved_at == patience:  # longer and longer, so that any period fits
                saved[:] = state
                saved_at = wave
                patience *= 2
        stop = at + count
        f, b, h = forward[at:stop], backward[at:stop], held[at:stop]
        go, back, ready = to_next[at:stop], to_previous[at:stop], free[at:stop]
        sent, returned = state[at:stop], state[size + at : size + stop]
        above, below = state[near + 1 : near + 1 + count], state[size + near : size + near + count]
        for i in range(count):
            time = max(returned[i] + ready[i], above[i]) + f[i]
            sent[i] = time + go[i]
            time = max(time + h[i], below[i]) + b[i]
            returned[i] = time + back[i]
        wave += 1
