"""The rule about updates: everything that adds to a gradient comes before its STEP, and everybody takes part."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipert.scheduler.action import Action, Kind
from pipert.scheduler.dependencies import ADDS_WEIGHT, SUMS
from pipert.scheduler.index import Table
from pipert.scheduler.verify.fault import Fault
from pipert.scheduler.verify.rule import Rule, Subject, where
from pipert.scheduler.verify.words import count


def _faults(subject: Subject) -> Iterator[Fault]:
    if subject.program is None:
        return
    yield from _wrong_norms(subject)
    yield from _left_out(subject, Kind.STEP)
    yield from _left_out(subject, Kind.UNDO)
    for stage in range(subject.index.num_stages):
        step, undo = _only(subject, Kind.STEP, stage), _only(subject, Kind.UNDO, stage)
        if step >= 0:
            yield from _stepped_too_early(subject, stage, step)
        if 0 <= step < undo:
            yield subject.at("update", undo, f"undoes {subject.place(step)} of the same program, which it should redo")
        yield from _wrong_gathers(subject, stage, max(step, undo))


def _only(subject: Subject, kind: Kind, stage: int) -> int:
    """The position of a stage's action of a kind without numbers, or −1."""
    return int(subject.index.table(kind)[stage, 0]) if subject.index.has(kind) else -1


def _wrong_norms(subject: Subject) -> Iterator[Fault]:
    """NORMs, which stand at every rank's first stage in an update, or nowhere."""
    index, program = subject.index, subject.program
    assert program is not None
    norms = [_only(subject, Kind.NORM, stage) for stage in range(index.num_stages)]
    if max(norms, default=-1) < 0:
        return
    for rank in range(program.num_ranks):
        own = program.placement.stages_of(rank)
        for stage in own[1:]:
            if norms[stage] >= 0:
                text = f"a rank takes part in the norm once, for its first stage, {own[0]}"
                yield subject.at("update", norms[stage], text)
        if own and norms[own[0]] < 0:
            text = f"rank {rank} never takes part in the norm, other ranks do"
            yield subject.missing("update", Action(own[0], Kind.NORM), text)
    if index.microbatches:
        text = "the norm is found in an update of its own, when all gradients are there"
        yield subject.at("update", max(norms), text)


def _left_out(subject: Subject, kind: Kind) -> Iterator[Fault]:
    """Stages that are not updated although others are; UNDO in a program that computes."""
    index = subject.index
    if not index.has(kind):
        return
    for stage in range(index.num_stages):
        position = int(index.table(kind)[stage, 0])
        if position < 0 and index.reducible[stage]:
            text = f"stage {stage} has no {kind.name}, other stages have"
            yield subject.missing("update", Action(stage, kind), text)
        if position >= 0 and kind is Kind.UNDO and index.microbatches:
            yield subject.at("update", position, "an update is undone in a program without micro-batches")


def _stepped_too_early(subject: Subject, stage: int, step: int) -> Iterator[Fault]:
    """What adds to the gradients of the stage, or of a weight tied to one of it on this rank, behind its STEP."""
    index, program = subject.index, subject.program
    assert program is not None
    own = [tie for tie, copies in enumerate(program.ties) if stage in copies]
    rank = index.owners[stage]
    sharing = {other for tie in own for other in program.ties[tie] if index.owners[other] == rank}
    adding = [index.table(kind)[stage] for kind in SUMS if index.has(kind)]
    for other in sharing - {stage}:
        adding += [index.table(kind)[other] for kind in ADDS_WEIGHT if index.has(kind)]
        adding += [index.table(Kind.TIE)[other, own]] if index.has(Kind.TIE) else []
    norms = [_only(subject, Kind.NORM, other) for other in range(index.num_stages) if index.owners[other] == rank]
    late = max((int(positions.max(initial=-1)) for positions in [*adding, np.array(norms)]), default=-1)
    if late > step:
        yield subject.at("update", step, f"stands before {subject.place(late)}, which it depends on", [step, late])


def _wrong_gathers(subject: Subject, stage: int, last: int) -> Iterator[Fault]:
    """GATHERs of updated shards: one behind each update where the shards of others are not fetched anyway."""
    index, program = subject.index, subject.program
    assert program is not None
    positions: Table = index.table(Kind.GATHER)[stage]
    positions = np.sort(positions[positions >= 0])
    if program.zero == 3 and index.microbatches:
        freed = int(index.table(Kind.FREE)[stage].max(initial=-1))
        if 0 <= last < freed:
            text = f"the old weights of stage {stage} are in use until {subject.place(freed)}"
            yield subject.at("update", last, text, [last, freed])
        return
    sharded = program.zero in (1, 2)
    for position in positions.tolist():
        if not sharded or position < last or last < 0:
            text = f"there are no new shards of stage {stage} to gather here (ZeRO stage {program.zero})"
            yield subject.at("update", position, text)
    if len(positions) > 1:
        yield subject.at("update", int(positions[-1]), f"a second GATHER of stage {stage} fetches the same again")
    if sharded and last >= 0 and not len(positions):
        text = f"the other replicas' new shards of stage {stage} are never gathered"
        yield subject.missing("update", Action(stage, Kind.GATHER), text)


def _describe(subject: Subject) -> str:
    steps = sum(1 for _ in where(subject.index.table(Kind.STEP) >= 0))
    if not steps:
        return "no weights are updated"
    return f"the weights of {count(steps, 'stage')} are updated once, behind all that their gradients depend on"


UPDATE_RULES = (Rule("update", _faults, _describe),)
