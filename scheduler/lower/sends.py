"""Pass: add a SEND and a RECV wherever a value goes to another rank."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pipert.scheduler.lower.meeting import meet
from pipert.scheduler.lower.messages import (
    CARRIED,
    NONE,
    carrying,
    counterparts,
    feeding,
    kinds_of,
    microbatches_of,
    needed,
    stages_of,
)
from pipert.scheduler.lower.order import Order, simulated_order
from pipert.scheduler.program import Program
from pipert.scheduler.row import ActionRow, Codes
from pipert.scheduler.semantics import Semantics


def add_messages(program: Program, order: Order | None = None) -> Program:
    """Add the messages to a program that has only computations (and collectives of its vocabulary).

    * Where each message is on its own (matched by tag, no queues, no rank held by a send), a SEND stands directly
      behind the action that makes the value, and a RECV directly before the one that needs it.
    * Otherwise the two ends of all messages are put in one order on all ranks (`pipert.scheduler.lower.order`): again a
      SEND stands behind the action that makes the value, and its RECV where the other rank is at that time. Where a
      send holds its rank, both stand where the two ranks wait least (`pipert.scheduler.lower.meeting`).

    A hand-over between two stages of one rank needs no message, nor does a gradient for a stage without a backward.

    Args:
        program: what to add to.
        order: when its rows happen in a simulated run, if somebody has simulated one already.
    """
    if _independent(program.semantics):
        return replace(program, rows=tuple(_beside(row.codes, program) for row in program.rows))
    order = order or simulated_order(program)
    if _held_by_sends(program.semantics):
        order = meet(order, program)
    return replace(program, rows=tuple(_in_order(row.codes, program, order, i) for i, row in enumerate(program.rows)))


def _independent(semantics: Semantics) -> bool:
    return semantics.matching == "tag" and semantics.channel == "message" and not _held_by_sends(semantics)


def _held_by_sends(semantics: Semantics) -> bool:
    return semantics.blocking and not semantics.buffered


def _beside(codes: Codes, program: Program) -> ActionRow:
    """Put each message next to its computation."""
    receives, sends = needed(feeding(codes), program), needed(carrying(codes), program)
    together = np.stack([receives, codes, sends], axis=1)
    return ActionRow.from_codes(together[together != NONE])


def _in_order(codes: Codes, program: Program, order: Order, rank: int) -> ActionRow:
    """Put each message where the simulated run makes it; of those made at one time, the order is that of `_turns`."""
    begins, ends = order.begins[rank], order.ends[rank]
    receives, sends = needed(feeding(codes), program), needed(carrying(codes), program)
    received, sent = receives != NONE, sends != NONE
    receives, sends = receives[received], sends[sent]
    origins = counterparts(receives)
    arrivals, departures = _ready(origins, order), _ready(sends, order)
    arrivals = np.where(arrivals >= 0, arrivals, begins[received])
    departures = np.where(departures >= 0, departures, ends[sent])
    times = np.concatenate([2 * begins + 1, 2 * arrivals, 2 * departures])  # messages before computations
    turns = np.concatenate([np.zeros_like(codes), _turns(origins, program), _turns(sends, program)])
    together = np.concatenate([codes, receives, sends])
    return ActionRow.from_codes(together[np.lexsort((turns, times))])


def _ready(sends: Codes, order: Order) -> Codes:
    """When the value of every SEND is there, or its two ranks meet; −1 if it never is."""
    ready: Codes = order.ready[CARRIED[kinds_of(sends)], stages_of(sends), microbatches_of(sends)]
    return ready


def _turns(sends: Codes, program: Program) -> Codes:
    """A number for each message, the same on both ranks, by which messages of one time are ordered.

    Even pairs of ranks go before odd ones, so that a whole pipeline of queues exchanges in two rounds instead of
    waiting for one another from end to end.
    """
    owners = np.array(program.placement.owners)
    here, there = owners[stages_of(sends)], owners[stages_of(counterparts(sends))]
    turns: Codes = np.minimum(here, there) % 2 << 62 | sends
    return turns
