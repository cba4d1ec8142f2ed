"""What an action needs before it may start, and what it makes: written once, here.

Every value of a step has a kind, a stage and a micro-batch. Verifier, simulator, lowering, executor and tests all
read the two tables below; the compiled kernels read the same tables as arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipert.scheduler.action import Action, Kind


class ValueKind(IntEnum):
    """What flows between actions."""

    ACTIVATION = 0  #: the stage's output
    GRADIENT = 1  #: the gradient of the stage's input
    WEIGHT = 2  #: the micro-batch's share of the stage's weight gradients


class Value(NamedTuple):
    """One value of a step: for example the output of stage 2 for micro-batch 0."""

    kind: ValueKind
    stage: int
    microbatch: int


#: For each compute kind: the values it needs, as (kind of value, that value's stage minus this action's stage).
NEEDS: dict[Kind, tuple[tuple[ValueKind, int], ...]] = {
    Kind.F: ((ValueKind.ACTIVATION, -1),),
    Kind.B: ((ValueKind.ACTIVATION, 0), (ValueKind.GRADIENT, +1)),
    Kind.I: ((ValueKind.ACTIVATION, 0), (ValueKind.GRADIENT, +1)),
    Kind.W: ((ValueKind.GRADIENT, 0),),
}

#: For each compute kind: the values it makes, all for its own stage.
MAKES: dict[Kind, tuple[ValueKind, ...]] = {
    Kind.F: (ValueKind.ACTIVATION,),
    Kind.B: (ValueKind.GRADIENT, ValueKind.WEIGHT),
    Kind.I: (ValueKind.GRADIENT,),
    Kind.W: (ValueKind.WEIGHT,),
}

#: The value a message carries, as (kind of value, that value's stage minus the action's stage), from either end.
CARRIES: dict[Kind, tuple[ValueKind, int]] = {
    Kind.SEND_F: (ValueKind.ACTIVATION, 0),
    Kind.RECV_F: (ValueKind.ACTIVATION, -1),
    Kind.SEND_META: (ValueKind.ACTIVATION, 0),
    Kind.RECV_META: (ValueKind.ACTIVATION, -1),
    Kind.SEND_B: (ValueKind.GRADIENT, 0),
    Kind.RECV_B: (ValueKind.GRADIENT, +1),
}

#: The message whose sizes a META message tells; the META comes first.
TELLS: dict[Kind, Kind] = {Kind.SEND_META: Kind.SEND_F, Kind.RECV_META: Kind.RECV_F}

#: For each kind of value the RECV that brings it from another rank.
BRINGS: dict[tuple[ValueKind, int], Kind] = {
    carried: kind for kind, carried in CARRIES.items() if kind not in TELLS and not kind.is_send
}

#: What makes a stage's gradients whole; the ones of a stage follow one another.
SUMS = (Kind.REDUCE, Kind.TIE, Kind.SCATTER)

#: What uses the weights of its stage, and so waits for the GATHER before it.
USES_WEIGHTS = (*NEEDS, Kind.FREE)

#: The kinds that add to the weight gradients of their stage.
ADDS_WEIGHT = (*(kind for kind, values in MAKES.items() if ValueKind.WEIGHT in values), Kind.T, Kind.G)

#: For the actions of a spread vocabulary: the collective of the same micro-batch that each waits for on its rank,
AWAITS: dict[Kind, Kind] = {Kind.S: Kind.CAST_H, Kind.SUM_H: Kind.STATS, Kind.T: Kind.STATS, Kind.G: Kind.CAST_E}
#: and the computation of the same rank that must stand before it.
FOLLOWS: dict[Kind, Kind] = {Kind.STATS: Kind.S, Kind.SUM_H: Kind.S, Kind.T: Kind.S}
#: The value that a collective takes from the first or the last stage, on whose rank it stands behind its maker,
TAKES: dict[Kind, tuple[ValueKind, int]] = {
    Kind.CAST_H: (ValueKind.ACTIVATION, -1),
    Kind.CAST_E: (ValueKind.GRADIENT, 0),
}
#: and the collective that the computations of the first or the last stage wait for: (stage, kind) -> collective.
GIVES: dict[tuple[int, Kind], Kind] = {
    (0, Kind.F): Kind.SUM_E,
    (-1, Kind.B): Kind.SUM_H,
    (-1, Kind.I): Kind.SUM_H,
}


def needs(action: Action, num_stages: int) -> Iterator[Value]:
    """The values that a compute action needs (the first stage's input and the loss are always there)."""
    for kind, offset in NEEDS[action.kind]:
        if 0 <= action.stage + offset < num_stages:
            yield Value(kind, action.stage + offset, action.microbatch)


def makes(action: Action) -> Iterator[Value]:
    """The values that a compute action makes."""
    for kind in MAKES[action.kind]:
        yield Value(kind, action.stage, action.microbatch)


def makers(value: Value) -> Iterator[Action]:
    """The actions any of which makes a value."""
    for kind, made in MAKES.items():
        if value.kind in made:
            yield Action(value.stage, kind, value.microbatch)


def carries(message: Action) -> Value:
    """The value that a message carries."""
    kind, offset = CARRIES[message.kind]
    return Value(kind, message.stage + offset, message.microbatch)


def needs_table() -> npt.NDArray[np.int64]:
    """`NEEDS` for compiled code: row ``kind * 2 + i`` is ``(value kind or -1, stage offset)``."""
    table = np.full((2 * len(NEEDS), 2), -1, dtype=np.int64)
    for kind, entries in NEEDS.items():
        for i, entry in enumerate(entries):
            table[2 * kind + i] = entry
    return table


def makes_table() -> npt.NDArray[np.int64]:
    """`MAKES` for compiled code: row ``kind`` is a 0/1 flag for each kind of value."""
    table = np.zeros((len(MAKES), len(ValueKind)), dtype=np.int64)
    for kind, values in MAKES.items():
        table[kind, list(values)] = 1
    return table
