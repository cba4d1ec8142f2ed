"""Messages in packed form: the tables of `action` and `dependencies` as arrays by kind."""

from __future__ import annotations

import numpy as np

from pipert.scheduler.action import COUNTERPART, KIND_MASK, KIND_SHIFT, MICROBATCH_MASK, STAGE_SHIFT, Kind
from pipert.scheduler.dependencies import BRINGS, CARRIES, MAKES, NEEDS
from pipert.scheduler.placement import Placement
from pipert.scheduler.program import Program
from pipert.scheduler.row import Codes, pack

NONE = -1


def by_kind(entries: dict[Kind, int]) -> Codes:
    """A table over all kinds, NONE where there is no entry."""
    table = np.full(len(Kind), NONE, dtype=np.int64)
    table[list(entries)] = list(entries.values())
    table.flags.writeable = False
    return table


#: Of every message: the kind at its other end, that end's stage minus this end's, and the kind of value it carries.
OTHER = by_kind({kind: other for kind, (other, _) in COUNTERPART.items()})
OFFSET = by_kind({kind: offset for kind, (_, offset) in COUNTERPART.items()})
CARRIED = by_kind({kind: value for kind, (value, _) in CARRIES.items()})

#: For each compute kind: the RECV that may feed it, and the SEND that may carry off what it makes.
RECEIVED = by_kind({kind: BRINGS[need] for kind, entries in NEEDS.items() for need in entries if need in BRINGS})
SENT = by_kind(
    {
        kind: COUNTERPART[receive][0]
        for kind, values in MAKES.items()
        for (value, _), receive in BRINGS.items()
        if value in values
    }
)

#: Whether a kind computes on its rank.
IS_COMPUTE = np.array([kind.is_compute for kind in Kind])

#: Whether a kind is one end of a message, and whether the sending one.
IS_MESSAGE = np.array([kind.is_message for kind in Kind])
IS_SEND = np.array([kind.is_send for kind in Kind])


def kinds_of(codes: Codes) -> Codes:
    """The kind of every action."""
    return codes >> KIND_SHIFT & KIND_MASK


def stages_of(codes: Codes) -> Codes:
    """The stage of every action."""
    return codes >> STAGE_SHIFT


def microbatches_of(codes: Codes) -> Codes:
    """The micro-batch of every action."""
    return codes & MICROBATCH_MASK


def counterparts(messages: Codes) -> Codes:
    """`Action.counterpart` of packed messages."""
    kinds = kinds_of(messages)
    return pack(stages_of(messages) + OFFSET[kinds], OTHER[kinds], microbatches_of(messages))


def peers_of(messages: Codes, placement: Placement) -> Codes:
    """The rank at the other end of every message."""
    peers: Codes = np.array(placement.owners)[stages_of(messages) + OFFSET[kinds_of(messages)]]
    return peers


def next_computations(codes: Codes) -> Codes:
    """For each place of a row, and for its end, the place of the first computation there or behind it, or the end."""
    places = np.where(np.append(IS_COMPUTE[kinds_of(codes)], True), np.arange(len(codes) + 1), len(codes))
    following: Codes = np.minimum.accumulate(places[::-1])[::-1]
    return following


def feeding(computations: Codes) -> Codes:
    """The RECV that would feed each packed computation if its value came from another rank; NONE if it needs none."""
    kinds = RECEIVED[kinds_of(computations)]
    return np.where(kinds == NONE, NONE, pack(stages_of(computations), kinds, microbatches_of(computations)))


def carrying(computations: Codes) -> Codes:
    """The SEND that would carry off what each packed computation makes; NONE if there is no such message."""
    kinds = SENT[kinds_of(computations)]
    return np.where(kinds == NONE, NONE, pack(stages_of(computations), kinds, microbatches_of(computations)))


def needed(messages: Codes, program: Program) -> Codes:
    """Replace by NONE what is no message: beyond an end of the pipeline, on one rank, or a gradient nobody wants."""
    owners = np.array(program.placement.owners)
    candidates = np.maximum(messages, 0)
    stages, kinds = stages_of(candidates), kinds_of(candidates)
    there = stages + OFFSET[kinds]
    exists = (messages != NONE) & (there >= 0) & (there < len(owners))
    crosses = exists & (owners[stages] != owners[np.where(exists, there, 0)])
    unwanted = (kinds == Kind.SEND_B) & (there < program.trainable_from)
    return np.where(crosses & ~unwanted, messages, NONE)
