"""Small changes to programs, each of a kind that a hand, a pass or a generator gets wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from pipert.scheduler.action import Action, Kind
from pipert.scheduler.program import Program
from pipert.scheduler.row import ActionRow

Rows = list[list[Action]]
Mutation = Callable[[Rows, Random], None]


def _some_row(rows: Rows, random: Random) -> list[Action]:
    return random.choice([row for row in rows if row] or [[Action(0, Kind.F, 0)]])


def _swap(rows: Rows, random: Random, kinds: Callable[[Kind], bool], reach: int) -> None:
    row = _some_row(rows, random)
    places = [at for at, action in enumerate(row) if kinds(action.kind)]
    if len(places) > 1:
        first = random.randrange(len(places) - 1)
        one, other = places[first], places[min(first + random.randint(1, reach), len(places) - 1)]
        row[one], row[other] = row[other], row[one]


def swap_messages(rows: Rows, random: Random) -> None:
    _swap(rows, random, lambda kind: kind.is_message, 2)


def swap_sends(rows: Rows, random: Random) -> None:
    _swap(rows, random, lambda kind: kind.is_send, 2)


def swap_neighbours(rows: Rows, random: Random) -> None:
    _swap(rows, random, lambda kind: True, 2)


def swap_any(rows: Rows, random: Random) -> None:
    _swap(rows, random, lambda kind: True, 1000)


def move(rows: Rows, random: Random) -> None:
    row = _some_row(rows, random)
    action = row.pop(random.randrange(len(row)))
    row.insert(random.randint(0, len(row)), action)


def drop(rows: Rows, random: Random) -> None:
    row = _some_row(rows, random)
    row.pop(random.randrange(len(row)))


def drop_both_ends(rows: Rows, random: Random) -> None:
    messages = [action for row in rows for action in row if action.kind.is_message]
    if messages:
        gone = random.choice(messages)
        rows[:] = [[action for action in row if action not in (gone, gone.counterpart)] for row in rows]


def repeat(rows: Rows, random: Random) -> None:
    row = _some_row(rows, random)
    row.insert(random.randint(0, len(row)), random.choice(row))


def wrong_stage(rows: Rows, random: Random) -> None:
    row = _some_row(rows, random)
    at = random.randrange(len(row))
    row[at] = row[at]._replace(stage=max(row[at].stage + random.choice((-1, 1)), 0))


def wrong_kind(rows: Rows, random: Random) -> None:
    row = _some_row(rows, random)
    at = random.randrange(len(row))
    row[at] = row[at]._replace(kind=random.choice(list(Kind)))


def wrong_microbatch(rows: Rows, random: Random) -> None:
    row = _some_row(rows, random)
    at = random.randrange(len(row))
    row[at] = row[at]._replace(microbatch=max(row[at].microbatch + random.choice((-1, 1)), 0))


def wrong_rank(rows: Rows, random: Random) -> None:
    row, other = _some_row(rows, random), random.choice(rows)
    other.insert(random.randint(0, len(other)), row.pop(random.randrange(len(row))))


def backward_twice(rows: Rows, random: Random) -> None:
    row = _some_row(rows, random)
    wholes = [at for at, action in enumerate(row) if action.kind is Kind.B]
    if wholes:
        at = random.choice(wholes)
        row[at + 1 : at + 1] = [row[at]._replace(kind=Kind.I), row[at]._replace(kind=Kind.W)]


def split_backward(rows: Rows, random: Random) -> None:
    """Right: a whole backward in halves, the weight half a little later."""
    row = _some_row(rows, random)
    wholes = [at for at, action in enumerate(row) if action.kind is Kind.B]
    if wholes:
        at = random.choice(wholes)
        weight = row[at]._replace(kind=Kind.W)
        row[at] = row[at]._replace(kind=Kind.I)
        row.insert(min(at + random.randint(1, 3), len(row)), weight)


MUTATIONS: list[Mutation] = [
    swap_messages,
    swap_sends,
    swap_neighbours,
    swap_any,
    move,
    drop,
    drop_both_ends,
    repeat,
    wrong_stage,
    wrong_kind,
    wrong_microbatch,
    wrong_rank,
    backward_twice,
    split_backward,
]


def mutated(program: Program, mutations: list[Mutation], random: Random) -> Program:
    """Apply mutations one after another; groups stay where they were unless they no longer fit."""
    rows = [list(row) for row in program.rows]
    for mutation in mutations:
        mutation(rows, random)
    spans = [program.spans(rank) for rank in range(len(rows))]
    fitting = tuple(
        tuple(span for span in own if span[1] <= len(row) and all(a.kind.is_message for a in row[slice(*span)]))
        for own, row in zip(spans, rows, strict=True)
    )
    return replace(program, rows=tuple(map(ActionRow, rows)), groups=fitting)


def regrouped(program: Program, random: Random) -> Program:
    """Other groups of neighbouring messages, or none."""
    groups = []
    for row in program.rows:
        spans, at = [], 0
        while at < len(row):
            size = random.randint(1, 3)
            if random.random() < 0.4 and all(action.kind.is_message for action in row[at : at + size]):
                spans.append((at, min(at + size, len(row))))
            at += size
        groups.append(tuple(spans))
    return replace(program, groups=tuple(groups))
