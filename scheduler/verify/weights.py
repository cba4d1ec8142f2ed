"""The rule about weights: whatever computes with a stage's weights finds them whole."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipert.scheduler.action import Action, Kind
from pipert.scheduler.dependencies import NEEDS
from pipert.scheduler.index import Table
from pipert.scheduler.verify.fault import Fault
from pipert.scheduler.verify.rule import Rule, Subject, where
from pipert.scheduler.verify.words import count


def _faults(subject: Subject) -> Iterator[Fault]:
    index = subject.index
    if subject.program is None:
        return
    if subject.program.zero < 3 or index.microbatches == 0:
        for stage, number in where(index.table(Kind.FREE) >= 0):
            text = f"the weights of stage {stage} are whole all the time (ZeRO stage {subject.program.zero})"
            yield subject.at("weights", int(index.table(Kind.FREE)[stage, number]), text)
        return
    for stage in range(index.num_stages):
        yield from _wrong_spans(subject, stage)


def _wrong_spans(subject: Subject, stage: int) -> Iterator[Fault]:
    """Where the GATHERs and FREEs of a stage do not alternate, or leave something out."""
    index = subject.index
    gathers, frees = _numbered(index.table(Kind.GATHER), stage), _numbered(index.table(Kind.FREE), stage)
    for number in range(max(len(gathers), len(frees))):
        for kind, there in ((Kind.GATHER, gathers), (Kind.FREE, frees)):
            if number >= len(there) or there[number] < 0:
                text = f"the weights of stage {stage} are {_DONE[kind]} fewer times than they are {_DONE[_OTHER[kind]]}"
                yield subject.missing("weights", Action(stage, kind, number), text)
                return
    spans = np.stack([gathers, frees], axis=1).reshape(-1)
    for late in np.flatnonzero(np.diff(spans) < 0).tolist():
        action = index.action(int(spans[late + 1]))
        text = f"stands before {subject.place(int(spans[late]))}; weights are gathered, then freed, number by number"
        yield subject.at("weights", int(spans[late + 1]), text, [int(spans[late])])
        if action.kind is Kind.FREE:
            return
    if not (np.diff(spans) < 0).any():
        yield from _used_while_freed(subject, stage, gathers, frees)


def _used_while_freed(subject: Subject, stage: int, gathers: Table, frees: Table) -> Iterator[Fault]:
    index = subject.index
    tables = [index.table(kind)[stage] for kind in NEEDS if index.has(kind)]
    uses = np.sort(np.concatenate([table[table >= 0] for table in tables] or [gathers[:0]]))
    before = np.searchsorted(gathers, uses) - 1
    whole = (before >= 0) & (np.append(frees, -1)[before] > uses)
    for position in uses[~whole].tolist():
        number = int(np.searchsorted(gathers, position)) - 1
        since = f"since {subject.place(int(frees[number]))}" if number >= 0 else "from the beginning"
        text = f"the weights of stage {stage} are freed {since}, and not gathered again"
        yield subject.at("weights", position, text)


def _numbered(table: Table, stage: int) -> Table:
    """The positions of a stage's numbered actions as far as there are any."""
    row = table[stage]
    there = np.flatnonzero(row >= 0)
    numbered: Table = row[: there[-1] + 1] if len(there) else row[:0]
    return numbered


_OTHER = {Kind.GATHER: Kind.FREE, Kind.FREE: Kind.GATHER}
_DONE = {Kind.GATHER: "gathered", Kind.FREE: "freed"}


def _describe(subject: Subject) -> str:
    if subject.program is None or subject.program.zero < 3:
        return "the weights of every stage are whole all the time"
    gathers = int(np.count_nonzero(subject.index.table(Kind.GATHER) >= 0))
    return f"every computation finds its weights whole, through {count(gathers, 'GATHER')}"


WEIGHT_RULES = (Rule("weights", _faults, _describe),)
