"""List scheduling: every rank, as soon as it is free, does what a rule prefers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import product

import numpy as np

from pipert.scheduler.compiled import compiled
from pipert.scheduler.instance import Instance
from pipert.scheduler.row import Codes
from pipert.scheduler.worklist import Ints, Seconds


class Prefer(IntEnum):
    """Which goes first where both a forward and an input gradient could start."""

    INPUTS = 0  #: input gradients: few activations live
    FORWARDS = 1  #: forwards, as far as the memory goes
    OTHER = 2  #: the one that the rank did not do last, as 1F1B
    OLDEST = 3  #: the one that arrived first


@dataclass(frozen=True)
class Rule:
    """How a rank chooses.

    Attributes:
        prefer: a forward or an input gradient.
        patience: a weight gradient starts only if nothing else is going to arrive within this share of its time;
            negative: it follows its input gradient at once, as in a whole backward.
        ahead: the most forwards ahead of their input gradients at each stage, the name of one of `caps`.
        deep: whether among several forwards the one of the last stage goes first, else the first stage's.
    """

    prefer: Prefer
    patience: float
    ahead: str
    deep: bool = True


def rules(instance: Instance) -> Iterator[Rule]:
    """The rules worth trying, the most promising ones first."""
    several = instance.num_stages > instance.placement.num_ranks
    ahead = ("memory", "eager", "trip", "trip+1", "1f1b")
    for patience, name, deep, prefer in product((0.0, 0.5, 1.0, -1.0), ahead, (True, False)[: 1 + several], Prefer):
        yield Rule(prefer, patience, name, deep)


def caps(instance: Instance, ahead: str) -> Ints:
    """The most forwards ahead of their input gradients at each stage ``[stages]``, ≥ 1.

    ``1f1b``: one for each stage from here on; ``eager``: twice that less one; ``trip``: as many as the slowest rank
    does while one goes from here to the loss and back; ``memory``: what the rank may keep.
    """
    size = instance.num_stages
    keeps = instance.limits[instance.owners]
    behind = np.arange(size, 0, -1)
    if ahead in ("1f1b", "eager"):
        return np.minimum(keeps, behind if ahead == "1f1b" else 2 * behind - 1)
    if ahead == "memory":
        return keeps
    each = instance.forward + instance.inputs
    period = np.bincount(instance.owners, each + instance.weights).max()
    trip = np.cumsum((each + 2 * instance.hops)[::-1])[::-1]
    most = np.ceil(trip / period) if period else np.ones(size)
    return np.maximum(1, np.minimum(keeps, most.astype(np.int64) + (ahead == "trip+1")))


def dispatch(instance: Instance, rule: Rule) -> list[Codes]:
    """Every rank's packed F, I and W in the order that the rule makes.

    The ranks' memory is kept, and nothing waits for ever: a forward begins only where all micro-batches that are under
    way could still be finished one after the other, each with room for all of the rank's stages (the banker's rule).
    """
    size, many = instance.num_stages, instance.microbatches
    ranks = instance.placement.num_ranks
    stages = np.concatenate([instance.placement.stages_of(rank) for rank in range(ranks)])
    offsets = np.concatenate([[0], np.cumsum(np.bincount(instance.owners))])
    codes = np.zeros(instance.num_actions, dtype=np.int64)
    leaves = 1 << (ranks - 1).bit_length()
    compiled(_dispatch, 16 * len(codes))(
        *(many, stages, offsets, instance.owners, instance.limits, caps(instance, rule.ahead)),
        *(np.concatenate([instance.forward, instance.inputs, instance.weights]), instance.hops),
        *(int(rule.prefer), rule.patience, 1 if rule.deep else -1, codes),
        *(np.full(2 * size * many, np.inf), np.zeros(3 * size, dtype=np.int64)),
        *(np.where(np.arange(leaves) < ranks, 0.0, np.inf), np.zeros(2 * leaves, dtype=np.int64)),
        *(np.zeros(ranks), np.ones(ranks, dtype=np.int64), 3 * many * offsets[:-1]),
    )
    assert codes[offsets[1:] * 3 * many - 1].all(), f"{rule} left something undone"
    return np.split(codes, offsets[1:-1] * 3 * many)


def _dispatch(
    many: int,
    stages: Ints,
    offsets: Ints,
    owners: Ints,
    limits: Ints,
    ahead: Ints,
    seconds: Seconds,
    hops: Seconds,
    prefer: int,
    patience: float,
    deep: int,
    codes: Ints,
    arrives: Seconds,
    done: Ints,
    clocks: Seconds,
    least: Ints,
    frees: Seconds,
    last: Ints,
    out: Ints,
) -> None:
    """Kernel of `dispatch`.

    Args:
        many: micro-batches m.
        stages: of rank 0, of rank 1, …, split at ``offsets``.
        offsets: where each rank's stages start ``[ranks + 1]``.
        owners: the rank of every stage.
        limits: of every rank.
        ahead: the most forwards ahead of every stage.
        seconds: of F, then I, then W of every stage.
        hops: from each stage to the next.
        prefer: a `Prefer`.
        patience: as in `Rule`.
        deep: 1 or −1.
        codes: out.
        arrives: when the needs of every F, then of every I are there; infinite at first ``[2 * stages * m]``.
        done: how many F, then I, then W of every stage, 0.
        clocks: when every rank can go on, 0; infinite up to a power of two of them.
        least: a tree over them for `_settle`, twice as long.
        frees: since when every rank does nothing, 0.
        last: the kind that it did last, F or I, 1.
        out: where its next code goes.
    """
    size = len(owners)
    never = float("inf")
    for j in range(many):
        arrives[j] = 0.0
    for rank in range(len(clocks)):
        least[len(clocks) + rank] = rank
        _settle(least, clocks, rank)
    while True:
        rank = least[1]
        now = clocks[rank]
        if now == never:
            break
        top = _newest(many, stages, offsets, limits, done, rank)
        forward, backward, weight, soon, blocked = _ready(
            many, stages, offsets, ahead, deep, arrives, done, rank, now, top
        )
        kind = -1
        if weight >= 0 and patience < 0.0:
            kind = 2
        elif forward >= 0 and backward >= 0:
            since = arrives[forward * many + done[forward]]
            kind = _preferred(prefer, last[rank], since, arrives[(size + backward) * many + done[size + backward]])
        elif forward >= 0 or backward >= 0:
            kind = 0 if forward >= 0 else 1
        elif weight >= 0 and (blocked or soon - now >= patience * seconds[2 * size + weight]):
            kind = 2
        if kind < 0:
            clocks[rank] = soon  # or earlier, if something arrives before
            _settle(least, clocks, rank)
            continue
        s = (forward, backward, weight)[kind]
        j = done[kind * size + s]
        done[kind * size + s] = j + 1
        codes[out[rank]] = s << 36 | (kind + (1 if kind > 0 else 0)) << 28 | j
        out[rank] += 1
        now += seconds[kind * size + s]
        clocks[rank] = now if out[rank] < 3 * many * offsets[rank + 1] else never
        _settle(least, clocks, rank)
        frees[rank] = now
        if kind == 2:
            continue
        last[rank] = kind
        turns = kind == 0 and s == size - 1  # the loss: the gradient is wanted where it is
        target = s if turns else (s + 1 if kind == 0 else s - 1)
        if target >= 0:
            now += 0.0 if turns else hops[min(s, target)]
            arrives[(target if kind == 0 and not turns else size + target) * many + j] = now
            other = owners[target]
            if clocks[other] > now and out[other] < 3 * many * offsets[other + 1]:
                clocks[other] = max(now, frees[other])
                _settle(least, clocks, other)


def _settle(least: Ints, clocks: Seconds, rank: int) -> None:
    """Find the least clocks anew after one has changed: ``least[1]`` is the first rank with the least.

    ``least`` is a tree whose node n has the children 2n and 2n + 1, and the ranks as leaves.
    """
    node = (len(clocks) + rank) // 2
    while node > 0:
        here = least[2 * node]
        there = least[2 * node + 1]
        least[node] = there if clocks[there] < clocks[here] else here
        node //= 2


def _preferred(prefer: int, last: int, forward: float, backward: float) -> int:
    """The kind that goes first where F and I could, which wait since these moments."""
    if prefer == 2:
        return 1 - last
    if prefer == 3:
        return 0 if forward < backward else 1
    return 1 - prefer


def _newest(many: int, stages: Ints, offsets: Ints, limits: Ints, done: Ints, rank: int) -> int:
    """The last micro-batch that may begin on a rank, by the banker's rule."""
    size = len(done) // 3
    begin = offsets[rank]
    end = offsets[rank + 1]
    oldest = many
    for at in range(begin, end):
        oldest = min(oldest, done[2 * size + stages[at]])
    top = many
    for at in range(begin - 1, end):  # room changes where a stage is: look there, and at the oldest one
        batch = oldest if at < begin else done[stages[at]]
        room = limits[rank]
        for other in range(begin, end):
            s = stages[other]
            room -= 1 if done[s] <= batch else done[s] - max(batch, done[2 * size + s])
        if batch < many and room < 1:
            top = min(top, batch)
    return top


def _ready(
    many: int,
    stages: Ints,
    offsets: Ints,
    ahead: Ints,
    deep: int,
    arrives: Seconds,
    done: Ints,
    rank: int,
    now: float,
    top: int,
) -> tuple[int, int, int, float, bool]:
    """What a rank could start now: the stages of the best F, I and W, each −1 if there is none.

    Returns:
        These three, when the next thing is going to arrive, and whether a forward waits only for memory.
    """
    size = len(done) // 3
    forward = -1
    backward = -1
    weight = -1
    blocked = False
    soon = float("inf")
    for at in range(offsets[rank], offsets[rank + 1]):
        s = stages[at]
        j = done[s]
        if j < many:
            here = arrives[s * many + j]
            if j > top:
                blocked = blocked or here <= now
            elif j - done[size + s] < ahead[s]:
                if here > now:
                    soon = min(soon, here)
                elif forward < 0 or (s - forward) * deep > 0:
                    forward = s
        j = done[size + s]
        if j < many:
            here = arrives[(size + s) * many + j]
            if here > now:
                soon = min(soon, here)
            elif backward < 0 or j < done[size + backward]:
                backward = s
        j = done[2 * size + s]
        if j < done[size + s] and (weight < 0 or j < done[2 * size + weight]):
            weight = s
    return forward, backward, weight, soon, blocked
