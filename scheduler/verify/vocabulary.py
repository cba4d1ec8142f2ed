"""The rule about a spread vocabulary: every rank does its part, in an order in which no collective can meet another."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipert.scheduler.action import KIND_MASK, KIND_SHIFT, MICROBATCH_MASK, VOCABULARY_COLLECTIVES, Action, Kind
from pipert.scheduler.dependencies import AWAITS, FOLLOWS, GIVES, TAKES
from pipert.scheduler.index import Index, Table
from pipert.scheduler.verify.fault import Fault
from pipert.scheduler.verify.rule import Rule, Subject, where
from pipert.scheduler.verify.words import count
from pipert.scheduler.vocabulary import VOCABULARY_KINDS, home_stages
from pipert.scheduler.wiring import collectives


def _faults(subject: Subject) -> Iterator[Fault]:
    assert subject.program is not None
    if subject.index.target.num_ranks == subject.program.placement.num_ranks:
        yield from _not_once(subject)
        yield from _too_early(subject)
        yield from _crossed(subject)


def _kinds(subject: Subject) -> tuple[Kind, ...]:
    program, index = subject.program, subject.index
    assert program is not None
    assert program.vocabulary is not None
    return program.vocabulary.kinds(index.trainable_from < index.num_stages)


def _not_once(subject: Subject) -> Iterator[Fault]:
    """Actions that are not there, or that nobody needs."""
    index = subject.index
    program, wanted = subject.program, _kinds(subject)
    assert program is not None
    assert program.vocabulary is not None
    homes = list(home_stages(program.placement))
    if program.vocabulary.embedding and index.trainable_from:
        text = f"the embedding is trained, but no gradient gets below stage {index.trainable_from}"
        yield Fault("vocabulary", text)
    for kind in VOCABULARY_KINDS:
        there = index.table(kind) >= 0
        allowed = np.zeros_like(there)
        allowed[homes] = kind in wanted
        for stage, microbatch in where(there & ~allowed):
            home = homes[index.owners[stage]]
            text = f"nothing in this program needs {kind.name}"
            if kind in wanted:
                text = f"the shard of rank {index.owners[stage]} is at home in stage {home}, not {stage}"
            yield subject.at("vocabulary", int(index.table(kind)[stage, microbatch]), text)
        for stage, microbatch in where(allowed & ~there):
            text = f"rank {index.owners[stage]} never does its part of {kind.name} for micro-batch {microbatch}"
            yield subject.missing("vocabulary", Action(stage, kind, microbatch), text)


def _too_early(subject: Subject) -> Iterator[Fault]:
    """Actions that stand before what they need on their rank."""
    index = subject.index
    for pairs, verb in ((AWAITS, "waits for"), (FOLLOWS, "uses")):
        for kind, needed in pairs.items():
            yield from _before(subject, index.table(kind), index.table(needed), verb)
    for kind, (value, stage) in TAKES.items():
        made = index.made(value)[stage]
        yield from _before(subject, _at_home(index, kind, stage)[None], made[None], "takes what is made by")
    for (stage, kind), collective in GIVES.items():
        given = _at_home(index, collective, stage)
        yield from _before(subject, index.table(kind)[stage][None], given[None], "waits for")


def _at_home(index: Index, kind: Kind, stage: int) -> Table:
    """The positions of a kind, by micro-batch, on the rank of a stage."""
    home: Table = index.table(kind)[int(np.argmax(index.owners == index.owners[stage]))]
    return home


def _before(subject: Subject, using: Table, needed: Table, verb: str) -> Iterator[Fault]:
    if using.shape != needed.shape:
        return
    for place in where((using >= 0) & (needed > using)):
        user, maker = int(using[place]), int(needed[place])
        text = f"{subject.index.action(user)} {verb} {subject.place(maker)}, which stands only later"
        yield subject.at("vocabulary", user, text)


def _crossed(subject: Subject) -> Iterator[Fault]:
    """Two ranks that take part in the collectives in different orders: they would mix them up."""
    index = subject.index
    first = collectives(index, 0)
    words = index.codes[first] & (KIND_MASK << KIND_SHIFT | MICROBATCH_MASK)
    for rank in range(1, index.target.num_ranks):
        mine = collectives(index, rank)
        both = min(len(mine), len(first))
        same = index.codes[mine[:both]] & (KIND_MASK << KIND_SHIFT | MICROBATCH_MASK) == words[:both]
        if not same.all():
            turn = int(np.argmin(same))
            here, there = int(mine[turn]), int(first[turn])
            text = f"collective {turn} of rank {rank} is {index.action(here)}, that of rank 0 {subject.place(there)}"
            yield subject.at("vocabulary", here, text, (here, there))


def _describe(subject: Subject) -> str:
    index = subject.index
    number = sum(int((index.table(kind) >= 0).sum()) for kind in VOCABULARY_COLLECTIVES) // index.target.num_ranks
    return (
        f"every rank does its part of {count(number, 'collective')} of the vocabulary, all in one order; at most "
        f"{count(_peak(subject), 'micro-batch')} of logits live per rank"
    )


def _peak(subject: Subject) -> int:
    """The most micro-batches of which a rank keeps its shard of the logits: from S to the last of what uses them."""
    index = subject.index
    users = [index.table(kind) for kind in (Kind.T, Kind.SUM_H, Kind.STATS) if index.has(kind)]
    most = 0
    for stage in np.flatnonzero((index.table(Kind.S) >= 0).any(axis=1)) if index.has(Kind.S) else ():
        starts = index.table(Kind.S)[stage]
        ends = np.max([table[stage] for table in users], axis=0)
        times = np.argsort(np.concatenate([starts, ends]))
        most = max(most, int(np.cumsum(np.where(times < len(starts), 1, -1)).max()))
    return most


VOCABULARY = Rule("vocabulary", _faults, _describe)
