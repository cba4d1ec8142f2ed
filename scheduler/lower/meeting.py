"""When two ranks that are held by a message had best meet.

Where a send holds its rank until the receive is there, and a receive until the send, one of the two waits whenever the
other is in the middle of a computation. The value is there some time before it is needed, and in that time there is
often a moment at which both ranks are between two computations.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pipert.scheduler.action import Kind
from pipert.scheduler.lower.messages import (
    CARRIED,
    NONE,
    counterparts,
    feeding,
    kinds_of,
    microbatches_of,
    needed,
    stages_of,
)
from pipert.scheduler.lower.order import Order, Times
from pipert.scheduler.program import Program
from pipert.scheduler.row import distinct

#: How many computations of either rank a message may be put off by.
PUT_OFF = 2


def meet(order: Order, program: Program) -> Order:
    """The same run with every message at the moment, from its value's making to its use, at which ranks wait least.

    Of equal moments it is the first. The run's computations stay where they are, so this is again one order that all
    ranks can keep (see `pipert.scheduler.lower.order`).
    """
    owners, ready = np.array(program.placement.owners), order.ready.copy()
    lanes = [_computations(order, program, rank) for rank in range(program.num_ranks)]
    for rank, row in enumerate(program.rows):
        receives = needed(feeding(row.codes), program)
        origins, uses = counterparts(receives[receives != NONE]), order.begins[rank][receives != NONE]
        places = CARRIED[kinds_of(origins)], stages_of(origins), microbatches_of(origins)
        made, peers = order.ready[places], owners[stages_of(origins)]
        for peer in distinct(peers).tolist():
            here = np.flatnonzero((peers == peer) & (made >= 0))
            ready[tuple(place[here] for place in places)] = _moments(made[here], uses[here], lanes[rank], lanes[peer])
    return replace(order, ready=ready)


def _computations(order: Order, program: Program, rank: int) -> tuple[Times, Times]:
    """When the rank's computations begin and end."""
    computes = kinds_of(program.rows[rank].codes) <= Kind.W
    return order.begins[rank][computes], order.ends[rank][computes]


def _moments(made: Times, uses: Times, *lanes: tuple[Times, Times]) -> Times:
    """For each message the moment at which the one rank waits least for the other."""
    best, least = made, _waits(made, lanes)
    for _, ends in lanes:
        after = np.searchsorted(ends, made, side="right")
        for _ in range(PUT_OFF):
            moment = ends[np.minimum(after, len(ends) - 1)]
            waits = _waits(moment, lanes)
            better = (moment >= made) & (moment <= uses) & ((waits < least) | (waits == least) & (moment < best))
            best, least = np.where(better, moment, best), np.where(better, waits, least)
            after = after + 1
    return best


def _waits(moments: Times, lanes: tuple[tuple[Times, Times], ...]) -> Times:
    """How long the first of two ranks to come between two computations, from each moment on, waits for the other."""
    free = []
    for begins, ends in lanes:
        last = np.searchsorted(begins, moments) - 1
        free.append(np.maximum(moments, np.where(last >= 0, ends[last], 0)))
    waits: Times = np.abs(free[0] - free[1])
    return waits
