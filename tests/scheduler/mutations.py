"""Small changes to programs, each of a kind that a hand, a pass or a generator gets wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import get_args

from pipert.scheduler.action import Action, Kind
from pipert.scheduler.program import Program, Span
from pipert.scheduler.row import ActionRow
from pipert.scheduler.semantics import Channel

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
    return _with_groups(program, rows, [list(program.spans(rank)) for rank in range(len(rows))])


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


# ---- changes that leave all work where it is, so that what goes wrong is a hang ----


def hasten_receive(program: Program, random: Random) -> Program:
    """A receive is posted earlier."""
    return _rearranged(program, random, -1, lambda kind: kind.is_message and not kind.is_send)


def delay_send(program: Program, random: Random) -> Program:
    """A send is posted later."""
    return _rearranged(program, random, +1, lambda kind: kind.is_send)


def exchange_neighbours(program: Program, random: Random) -> Program:
    """Two neighbouring messages change places."""
    return _rearranged(program, random, random.choice((-1, 1)), lambda kind: kind.is_message, only_messages=True)


def _rearranged(
    program: Program, random: Random, step: int, kinds: Callable[[Kind], bool], only_messages: bool = False
) -> Program:
    rows = [list(row) for row in program.rows]
    row = _some_row(rows, random)
    places = [at for at, action in enumerate(row) if kinds(action.kind)]
    at = random.choice(places or [0])
    for _ in range(1 if only_messages else random.randint(1, 6)):
        beside = at + step
        if not places or not 0 <= beside < len(row) or (only_messages and not row[beside].kind.is_message):
            break
        row[at], row[beside] = row[beside], row[at]
        at = beside
    return _with_groups(program, rows, [list(program.spans(rank)) for rank in range(len(rows))])


def split_group(program: Program, random: Random) -> Program:
    """A group becomes two, or loses the message at one end."""

    def split(spans: list[Span], at: int) -> None:
        start, stop = spans[at]
        middle = random.randint(start, stop)
        halves = [(start, middle), (middle, stop)]
        spans[at : at + 1] = [half for half in halves if half[1] - half[0] > random.randint(0, 1)]

    return _with_one_changed(program, random, split)


def merge_groups(program: Program, random: Random) -> Program:
    """A group takes in the messages beside it, and with them the groups that they are in."""

    def merge(spans: list[Span], at: int) -> None:
        start, stop = spans[at]
        start, stop = max(0, start - random.randint(0, 2)), stop + random.randint(0, 2)
        spans[:] = [span for span in spans if span[1] <= start or span[0] >= stop] + [(start, stop)]

    return _with_one_changed(program, random, merge)


def other_channel(program: Program, random: Random) -> Program:
    """Other messages share a queue, or ranks wait in every message."""
    rules = random.choice([{"channel": each} for each in get_args(Channel)] + [{"blocking": True}])
    return replace(program, semantics=replace(program.semantics, **rules))


def _with_one_changed(program: Program, random: Random, change: Callable[[list[Span], int], None]) -> Program:
    spans = [list(program.spans(rank)) for rank in range(len(program.rows))]
    own = random.choice([each for each in spans if each] or [[]])
    if own:
        change(own, random.randrange(len(own)))
    return _with_groups(program, [list(row) for row in program.rows], spans)


def _with_groups(program: Program, rows: Rows, spans: list[list[Span]]) -> Program:
    """The program with these rows, and of these groups the ones that hold messages only."""
    fitting = tuple(
        tuple(span for span in sorted(own) if span[1] <= len(row) and all(a.kind.is_message for a in row[slice(*span)]))
        for own, row in zip(spans, rows, strict=True)
    )
    return replace(program, rows=tuple(map(ActionRow, rows)), groups=fitting)


#: Those that change who waits for whom in groups and queues.
WAITING = [hasten_receive, delay_send, exchange_neighbours, split_group, merge_groups, regrouped, other_channel]
