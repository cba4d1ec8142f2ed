"""Rules about messages and groups: everything sent is received where it is needed, and the other way round."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipert.scheduler.action import COUNTERPART, Action, Kind
from pipert.scheduler.dependencies import CARRIES, ValueKind
from pipert.scheduler.program import Program
from pipert.scheduler.verify.fault import Fault
from pipert.scheduler.verify.order import same_rank, shifted
from pipert.scheduler.verify.rule import Rule, Subject, where
from pipert.scheduler.verify.words import count


def _unpaired(subject: Subject) -> Iterator[Fault]:
    for kind in COUNTERPART:
        if subject.index.has(kind):
            yield from _useless(subject, kind)
            yield from _alone(subject, kind)


def _useless(subject: Subject, kind: Kind) -> Iterator[Fault]:
    """Messages over a boundary that is none, or of gradients that nobody uses."""
    index, table = subject.index, subject.index.table(kind)
    exists, local = same_rank(index, COUNTERPART[kind][1])
    for stage, microbatch in where(~exists & (table >= 0)):
        text = f"stage {stage} is the {'first' if stage == 0 else 'last'} one, there is nobody at the other end"
        yield subject.at("message", int(table[stage, microbatch]), text)
    for stage, microbatch in where(local & (table >= 0)):
        far = stage + COUNTERPART[kind][1]
        text = f"stages {stage} and {far} are both on rank {index.owners[stage]}, nothing is sent between them"
        yield subject.at("message", int(table[stage, microbatch]), text)
    value, offset = CARRIES[kind]
    if value is ValueKind.GRADIENT:
        lowest = max(index.trainable_from + 1 - offset, 0)  # the lowest stage whose message carries a gradient of use
        for stage, microbatch in where((exists & ~local & (table >= 0))[:lowest]):
            text = f"stage {stage + offset - 1} has no backward that would use this gradient"
            yield subject.at("message", int(table[stage, microbatch]), text)


def _alone(subject: Subject, kind: Kind) -> Iterator[Fault]:
    """Messages without their other end."""
    index, table = subject.index, subject.index.table(kind)
    other, offset = COUNTERPART[kind]
    exists, local = same_rank(index, offset)
    for stage, microbatch in where(exists & ~local & (table >= 0) & (shifted(index.table(other), offset) < 0)):
        end, peer = Action(stage + offset, other, microbatch), index.owners[stage + offset]
        verb = "receives it" if kind.is_send else "sends it"
        text = f"rank {peer} never {verb}: there is no {end}"
        yield subject.at("message", int(table[stage, microbatch]), text)


def _bad_groups(subject: Subject) -> Iterator[Fault]:
    program = subject.program
    if program is None or not program.groups:
        return
    if len(program.groups) != program.num_ranks:
        yield Fault("group", f"groups for {len(program.groups)} of {program.num_ranks} ranks")
        return
    for rank in range(program.num_ranks):
        yield from _bad_groups_of(program, rank)


def _bad_groups_of(program: Program, rank: int) -> Iterator[Fault]:
    row, spans = program.rows[rank], np.array(program.spans(rank), dtype=np.int64).reshape(-1, 2)
    starts, stops = spans.T
    if len(spans) and not program.semantics.grouped:
        yield Fault("group", f"{program.semantics.name} cannot issue messages as a group", rank, int(starts[0]))
    free = np.append(0, stops[:-1])
    for wrong in np.flatnonzero(~((free <= starts) & (starts < stops) & (stops <= len(row)))).tolist():
        start, stop = spans[wrong].tolist()
        text = f"group [{start}, {stop}) is empty, overlaps the one before or leaves the row of {len(row)} actions"
        yield Fault("group", text, rank, start)
        return
    computing = np.append(0, np.cumsum((row.kinds < Kind.SEND_F) | (row.kinds > Kind.RECV_META)))
    for wrong in np.flatnonzero(computing[stops] > computing[starts]).tolist():
        start, stop = spans[wrong].tolist()
        index, action = next((i, row[i]) for i in range(start, stop) if not row[i].kind.is_message)
        text = f"only messages can be issued as a group, and [{start}, {stop}) is one"
        yield Fault("group", text, rank, index, action)


def _describe(subject: Subject) -> str:
    sends = sum(int(np.count_nonzero(subject.index.table(kind) >= 0)) for kind in COUNTERPART if kind.is_send)
    return f"each of {count(sends, 'message')} is sent once, received once, between the right ranks, and used"


MESSAGE_RULES = (
    Rule("message", _unpaired, _describe),
    Rule("group", _bad_groups, lambda _: "groups hold neighbouring messages only"),
)
