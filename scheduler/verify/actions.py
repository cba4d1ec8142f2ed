"""Rules about single actions and their number: bounds, ownership, uniqueness, completeness."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipert.scheduler.action import KIND_MASK, KIND_SHIFT, MICROBATCH_MASK, NUMBERLESS, STAGE_SHIFT, Action, Kind
from pipert.scheduler.index import most_gathers
from pipert.scheduler.program import Program
from pipert.scheduler.verify.fault import Fault
from pipert.scheduler.verify.rule import Rule, Subject, where
from pipert.scheduler.verify.words import count
from pipert.scheduler.vocabulary import VOCABULARY_KINDS


def _out_of_bounds(subject: Subject) -> Iterator[Fault]:
    index, ranks = subject.index, subject.index.target.placement.num_ranks
    if index.target.num_ranks != ranks:
        yield Fault("bounds", f"{index.target.num_ranks} rows for a placement on {ranks} ranks; give each rank one row")
    if index.microbatches < (0 if subject.program else 1):
        yield Fault("bounds", f"{index.target.microbatches} micro-batches; a step has at least one")
    if subject.program is not None:
        yield from _wrong_stages(subject.program)
    for position in np.flatnonzero(~index.usable).tolist():
        code = int(index.codes[position])
        problem = _problem(subject, code)
        if problem is not None:
            rank, place = index.locate(position)
            known = code >> KIND_SHIFT & KIND_MASK < len(Kind)
            yield Fault("bounds", problem, rank, place, Action.from_code(code) if known else None)


def _wrong_stages(program: Program) -> Iterator[Fault]:
    """Stages that a program names and does not have."""
    stages = program.num_stages
    if not 0 <= program.trainable_from <= stages:
        yield Fault("bounds", f"trainable_from is {program.trainable_from}; with {stages} stages it is 0 to {stages}")
    if program.zero not in range(4):
        yield Fault("bounds", f"zero is {program.zero}; the stages of ZeRO are 0 to 3")
    for tie, copies in enumerate(program.ties):
        if not set(copies) <= set(range(stages)):
            yield Fault("bounds", f"tie {tie} is of stages {copies}; stages are 0 to {stages - 1}")


def _problem(subject: Subject, code: int) -> str | None:
    """What is out of bounds about a packed action, if anything is."""
    index = subject.index
    stage, number, kind = code >> STAGE_SHIFT, code & MICROBATCH_MASK, code >> KIND_SHIFT & KIND_MASK
    if kind >= len(Kind):
        return f"{kind} is not the number of a kind; kinds are 0 to {len(Kind) - 1}"
    if subject.program is None and not Kind(kind).is_scheduled:
        return f"a schedule only computes; {Kind(kind).name} belongs in a program"
    if not 0 <= stage < index.num_stages:
        return f"stage {stage} of {index.num_stages}; stages are 0 to {index.num_stages - 1}"
    if Kind(kind) is Kind.TIE:
        ties = subject.program.ties if subject.program else ()
        return None if number < len(ties) else f"tie {number} of {len(ties)}"
    if Kind(kind) in VOCABULARY_KINDS and (subject.program is None or subject.program.vocabulary is None):
        return f"{Kind(kind).name} belongs to a spread vocabulary, which this program has not"
    if Kind(kind) in NUMBERLESS:
        return None if number == 0 else f"{Kind(kind).name} takes no number, this one has {number}"
    if Kind(kind) in (Kind.GATHER, Kind.FREE):
        most = most_gathers(index.microbatches)
        return None if number < most else f"number {number}; a stage's weights are gathered at most {most} times"
    if number >= index.microbatches:
        return f"micro-batch {number} of {index.microbatches}; micro-batches are 0 to {index.microbatches - 1}"
    return None


def _not_owned(subject: Subject) -> Iterator[Fault]:
    index = subject.index
    for position in np.flatnonzero(~index.usable).tolist():
        code = int(index.codes[position])
        if _problem(subject, code) is None:
            action, (rank, place) = Action.from_code(code), index.locate(position)
            owner = int(index.owners[action.stage])
            message = f"stage {action.stage} is on rank {owner}, so it cannot be on rank {rank} too"
            yield Fault("ownership", message, rank, place, action)


def _repeated(subject: Subject) -> Iterator[Fault]:
    index = subject.index
    for position in index.repeated.tolist():
        action = index.action(position)
        first = int(index.table(action.kind)[action.stage, action.microbatch])
        yield subject.at("uniqueness", position, f"a second {action}; the first is action {index.locate(first)[1]}")
    yield from _backward_twice(subject)
    for kind in (Kind.B, Kind.I, Kind.W):
        if index.has(kind):
            for stage, microbatch in where(index.table(kind)[: index.trainable_from] >= 0):
                message = f"stage {stage} has nothing to train: the first stage that has is {index.trainable_from}"
                yield subject.at("uniqueness", int(index.table(kind)[stage, microbatch]), message)


def _backward_twice(subject: Subject) -> Iterator[Fault]:
    """A whole backward beside one in halves."""
    index = subject.index
    whole, inputs, weights = (index.table(kind) for kind in (Kind.B, Kind.I, Kind.W))
    if not index.has(Kind.B) or not (index.has(Kind.I) or index.has(Kind.W)):
        return
    for stage, microbatch in where((whole >= 0) & ((inputs >= 0) | (weights >= 0))):
        places = [int(table[stage, microbatch]) for table in (whole, inputs, weights)]
        there = sorted(place for place in places if place >= 0)
        names = " and ".join(map(subject.place, there))
        message = f"micro-batch {microbatch} is back-propagated twice on stage {stage}: {names}; use B, or I and W"
        yield subject.at("uniqueness", there[1], message, there)


def _absent(subject: Subject) -> Iterator[Fault]:
    index = subject.index
    if index.sparse:
        wanted = index.num_stages * index.microbatches
        message = f"{count(len(index.codes), 'action')} cannot run {count(wanted, 'forward')}"
        yield Fault("completeness", f"{message} ({index.num_stages} stages, {index.microbatches} micro-batches)")
        return
    for stage, microbatch in where(index.table(Kind.F) < 0):
        message = f"stage {stage} never runs the forward of micro-batch {microbatch}"
        yield subject.missing("completeness", Action(stage, Kind.F, microbatch), message)
    start = index.trainable_from
    whole, inputs, weights = (index.table(kind)[start:] >= 0 for kind in (Kind.B, Kind.I, Kind.W))
    for stage, microbatch in where(~whole & ~(inputs & weights)):
        place = (stage, microbatch)
        stage += start
        if inputs[place] or weights[place]:
            action = Action(stage, Kind.W if inputs[place] else Kind.I, microbatch)
            half = "weight" if inputs[place] else "input"
            message = f"stage {stage} never computes the {half} gradients of micro-batch {microbatch}"
        else:
            action = Action(stage, Kind.B, microbatch)
            message = f"stage {stage} never back-propagates micro-batch {microbatch}"
        yield subject.missing("completeness", action, message)


def _complete(subject: Subject) -> str:
    index = subject.index
    trained = index.num_stages - index.trainable_from
    if index.microbatches == 0:
        return "an update alone, without micro-batches"
    stages, batches = count(index.num_stages, "stage"), count(index.microbatches, "micro-batch")
    backward = f"its backward (B, or I and W) on {'each' if not index.trainable_from else count(trained, 'stage')}"
    return f"each of {batches} has its forward on each of {stages}" + (f" and {backward}" if trained else "")


ACTION_RULES = (
    Rule(
        "bounds",
        _out_of_bounds,
        lambda s: f"every one of {count(len(s.index.codes), 'action')} is of a known kind, stage and micro-batch",
    ),
    Rule("ownership", _not_owned, lambda _: "every stage is on one rank, the one it is placed on"),
    Rule("uniqueness", _repeated, lambda _: "nothing is done twice"),
    Rule("completeness", _absent, _complete),
)
