"""Rules about the order within a rank: what an action needs, or sends, stands before it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from pipert.scheduler.action import Action, Kind
from pipert.scheduler.dependencies import ADDS_WEIGHT, BRINGS, CARRIES, NEEDS, TELLS, ValueKind
from pipert.scheduler.index import Index, Mask, Table
from pipert.scheduler.verify.fault import Fault
from pipert.scheduler.verify.rule import Rule, Subject, where

_CALLED = {ValueKind.ACTIVATION: "output", ValueKind.GRADIENT: "input gradient", ValueKind.WEIGHT: "weight gradient"}


def shifted(table: Table, offset: int) -> Table:
    """The table whose row s is row ``s + offset`` (rows that do not exist: −1)."""
    if offset == 0:
        return table
    result = np.full_like(table, -1)
    if offset > 0:
        result[:-offset] = table[offset:]
    else:
        result[-offset:] = table[:offset]
    return result


def same_rank(index: Index, offset: int) -> tuple[Mask, Mask]:
    """For every stage s: does stage ``s + offset`` exist, and is it on the same rank? Both ``[stages, 1]``."""
    stages = np.arange(index.num_stages) + offset
    exists = (stages >= 0) & (stages < index.num_stages)
    local = exists & (index.owners[np.where(exists, stages, 0)] == index.owners)
    return exists[:, None], local[:, None]


def _too_early(subject: Subject) -> Iterator[Fault]:
    for kind, entries in NEEDS.items():
        if subject.index.has(kind):
            for value, offset in entries:
                yield from _local_need(subject, kind, value, offset)
                if subject.program is not None and offset != 0:
                    yield from _remote_need(subject, kind, value, offset)
    for kind, (value, _) in CARRIES.items():
        if kind.is_send and subject.index.has(kind):
            yield from _local_need(subject, kind, value, 0)
    if subject.index.has(Kind.SCATTER):
        yield from _local_need(subject, Kind.SCATTER, ValueKind.WEIGHT, 0)
    for meta, message in TELLS.items():
        if subject.index.has(meta):
            yield from _size_after_message(subject, meta, message)


def _local_need(subject: Subject, kind: Kind, value: ValueKind, offset: int) -> Iterator[Fault]:
    """Actions that stand before the action of the same rank that makes what they need."""
    index = subject.index
    using, made = index.table(kind), shifted(index.made(value), offset)
    _, local = same_rank(index, offset)
    for stage, microbatch in where(local & (using >= 0) & (made > using)):
        maker, user = int(made[stage, microbatch]), int(using[stage, microbatch])
        message = (
            f"{index.action(user)} needs the {_CALLED[value]} of stage {stage + offset}, which {index.action(maker)} "
            f"makes only later (action {index.locate(maker)[1]})"
        )
        yield subject.at("dependency", user, message)


def _remote_need(subject: Subject, kind: Kind, value: ValueKind, offset: int) -> Iterator[Fault]:
    """Actions without a receive before them for what another rank makes."""
    index, bringer = subject.index, BRINGS[value, offset]
    using, brought = index.table(kind), index.table(bringer)
    exists, local = same_rank(index, offset)
    for stage, microbatch in where(exists & ~local & (using >= 0) & ~((brought >= 0) & (brought < using))):
        user, receive = int(using[stage, microbatch]), int(brought[stage, microbatch])
        text = "is missing" if receive < 0 else f"stands only later (action {index.locate(receive)[1]})"
        message = (
            f"{index.action(user)} needs the {_CALLED[value]} of stage {stage + offset} from rank "
            f"{index.owners[stage + offset]}, but {Action(stage, bringer, microbatch)} {text}"
        )
        yield subject.at("dependency", user, message)


def _size_after_message(subject: Subject, meta: Kind, message: Kind) -> Iterator[Fault]:
    index = subject.index
    told, sized = index.table(meta), index.table(message)
    for stage, microbatch in where((told >= 0) & ~(told < sized)):
        position = int(told[stage, microbatch])
        text = f"{index.action(position)} must stand before {Action(stage, message, microbatch)}, whose size it tells"
        yield subject.at("dependency", position, text)


def _reduced_too_early(subject: Subject) -> Iterator[Fault]:
    """Collectives on gradients that are not all there."""
    index = subject.index
    last: npt.NDArray[np.int64] = np.full(index.num_stages, -1, dtype=np.int64)
    for kind in filter(index.has, ADDS_WEIGHT):
        last = np.maximum(last, index.table(kind).max(axis=1, initial=-1))
    for kind in (Kind.REDUCE, Kind.TIE, Kind.STEP):
        for stage, number in where(index.table(kind) >= 0) if index.has(kind) else ():
            position = int(index.table(kind)[stage, number])
            if not (stage >= index.trainable_from if kind is Kind.TIE else index.reducible[stage]):
                message = f"stage {stage} has no gradients: the first stage that has is {index.trainable_from}"
                yield subject.at("dependency", position, message)
            elif position < last[stage]:
                missed = index.action(int(last[stage]))
                message = f"{index.action(position)} stands before {missed}, whose gradient it would miss"
                yield subject.at("dependency", position, message)


def _find(subject: Subject) -> Iterator[Fault]:
    yield from _too_early(subject)
    yield from _reduced_too_early(subject)


ORDER_RULES = (
    Rule("dependency", _find, lambda _: "on its rank, everything computed or sent stands after what it needs"),
)
