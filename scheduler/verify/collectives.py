"""Rules about collectives: everyone who must take part does, and in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np

from pipert.scheduler.action import Action, Kind
from pipert.scheduler.verify.fault import Fault
from pipert.scheduler.verify.rule import Rule, Subject, where
from pipert.scheduler.verify.words import count

#: For one tie: where each rank takes part (its last TIE).
Parts = dict[int, int]


def _faults(subject: Subject) -> Iterator[Fault]:
    if subject.program is None:
        return
    yield from _not_reduced(subject)
    parts: dict[int, Parts] = {}
    for tie, stages in enumerate(subject.program.ties):
        parts[tie] = {}
        yield from _absent_from_tie(subject, tie, stages, parts[tie])
        yield from _partly_reduced(subject, tie, parts[tie])
    for one, other in combinations(parts, 2):
        yield from _crossed(subject, one, other, parts)


def _not_reduced(subject: Subject) -> Iterator[Fault]:
    """Stages, or micro-batches of theirs, that are not reduced although others are, and what is reduced twice."""
    index = subject.index
    if not index.has(Kind.REDUCE) and not index.has(Kind.SCATTER):
        return
    scattered = index.table(Kind.SCATTER) >= 0
    reduced = index.table(Kind.REDUCE)[:, 0] >= 0 if index.has(Kind.REDUCE) else np.zeros(index.num_stages, np.bool_)
    for stage in np.flatnonzero(index.reducible).tolist():
        if reduced[stage] and scattered[stage].any():
            position = int(index.table(Kind.REDUCE)[stage, 0])
            yield subject.at("collective", position, f"the gradients of stage {stage} are reduced by SCATTERs too")
        elif not reduced[stage] and not scattered[stage].any():
            text = f"the gradients of stage {stage} are never reduced, those of other stages are"
            yield subject.missing("collective", Action(stage, Kind.REDUCE), text)
        for microbatch in np.flatnonzero(~scattered[stage]).tolist() if scattered[stage].any() else ():
            text = f"stage {stage} never reduces the gradients of micro-batch {microbatch}, it does those of others"
            yield subject.missing("collective", Action(stage, Kind.SCATTER, microbatch), text)
    for stage, microbatch in where(scattered[: index.trainable_from]):
        text = f"stage {stage} has no gradients: the first stage that has is {index.trainable_from}"
        yield subject.at("collective", int(index.table(Kind.SCATTER)[stage, microbatch]), text)


def _absent_from_tie(subject: Subject, tie: int, stages: tuple[int, ...], parts: Parts) -> Iterator[Fault]:
    """Stages that hold a copy and take no part, or take part and hold none; fills `parts`."""
    index = subject.index
    holders = [stage for stage in stages if 0 <= stage < index.num_stages]
    for stage in range(index.num_stages) if index.has(Kind.TIE) else ():
        position = int(index.table(Kind.TIE)[stage, tie])
        if position >= 0 and stage not in stages:
            yield subject.at("collective", position, f"stage {stage} holds no copy of tie {tie}, stages {stages} do")
        elif position >= 0:
            owner = int(index.owners[stage])
            parts[owner] = max(position, parts.get(owner, -1))
    needed = min(stages, default=0) >= index.trainable_from and len({*index.owners[holders].tolist()}) > 1
    for stage in holders if parts or needed else ():
        if not index.has(Kind.TIE) or index.table(Kind.TIE)[stage, tie] < 0:
            text = f"stage {stage} holds a copy of tie {tie} and never takes part in its sum"
            yield subject.missing("collective", Action(stage, Kind.TIE, tie), text)


def _partly_reduced(subject: Subject, tie: int, parts: Parts) -> Iterator[Fault]:
    """Ranks that sum a tie's gradients before they are reduced, where others do it after."""
    reduced: dict[bool, int] = {}
    for position in parts.values():
        stage = subject.index.action(position).stage
        scatters = subject.index.table(Kind.SCATTER)[stage]
        for late in scatters[scatters > position].tolist():
            text = f"takes part before {subject.place(late)}, whose gradient the sum would miss"
            yield subject.at("collective", position, text, [position, late])
        reduce = int(subject.index.table(Kind.REDUCE)[stage, 0]) if subject.index.has(Kind.REDUCE) else -1
        reduced[0 <= max(reduce, *scatters.tolist(), -1) < position] = position
    if len(reduced) > 1:
        text = f"takes part after its REDUCE, {subject.place(reduced[False])} before: the sum would mix the two"
        yield subject.at("collective", reduced[True], text, reduced.values())


def _crossed(subject: Subject, one: int, other: int, parts: dict[int, Parts]) -> Iterator[Fault]:
    """Two ties that two ranks sum in different orders."""
    shared = sorted(parts[one].keys() & parts[other].keys())
    orders = {parts[one][rank] < parts[other][rank]: rank for rank in shared}
    if len(orders) > 1:
        text = f"rank {orders[True]} sums tie {one} before tie {other}, rank {orders[False]} after it"
        yield subject.at("collective", parts[one][orders[False]], text)


def _describe(subject: Subject) -> str:
    ties = len(subject.program.ties) if subject.program else 0
    per_batch = "every trained stage is reduced with each micro-batch" if subject.index.has(Kind.SCATTER) else ""
    reduced = "every trained stage is reduced" if subject.index.has(Kind.REDUCE) else per_batch or "no stage is reduced"
    summed = f"{count(ties, 'tie')} summed by every rank that holds a copy" if ties else "no weights are tied"
    return f"{reduced}, {summed}"


COLLECTIVE_RULES = (Rule("collective", _faults, _describe),)
