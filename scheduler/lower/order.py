"""One order of all messages that everybody can keep: the order in which a simulated run makes them.

Place both ends of every message, on either rank, where this order has it: between the computations that come before
and after. Then no transport can deadlock or swap messages, whatever it queues, blocks or matches by order. For of all
that is not complete take what comes first in the order: everything before it on its one or two ranks, and in their
queues, is complete, so it can go on. (Posting an operation even earlier, in an unchanged queue, delays nothing.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipert.scheduler.action import Kind
from pipert.scheduler.index import flatten
from pipert.scheduler.play import run_schedule
from pipert.scheduler.program import Program

Times = npt.NDArray[np.int64]

#: The durations that the run is simulated with. Any would be safe; these are close to a transformer's.
DURATIONS = {Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1}


@dataclass(frozen=True, eq=False)
class Order:
    """When everything happens in the simulated run.

    Attributes:
        begins: for every rank when each of its computations starts.
        ends: for every rank when each of its computations ends.
        ready: when each value is there and its message is made, ``[value kind, stage, micro-batch]``; −1 if never.
    """

    begins: tuple[Times, ...]
    ends: tuple[Times, ...]
    ready: Times


def simulated_order(program: Program) -> Order:
    """Simulate a program that has only computations so far, with messages that take no time.

    What can never happen (the verifier will say why) comes last on its rank.
    """
    codes, offsets = flatten(program.rows)
    owners = np.array(program.placement.owners)
    durations = np.zeros((len(Kind), len(owners)))
    for kind, duration in DURATIONS.items():
        durations[kind] = duration
    played = run_schedule(codes, offsets, owners, program.microbatches, durations, comm=np.zeros(len(owners)))
    begins, ends = played.begins.astype(np.int64), played.ends.astype(np.int64)
    for cursor, stop in zip(played.cursors, offsets[1:], strict=True):
        begins[cursor:stop] = 4 * len(codes) + 2 * np.arange(stop - cursor)
        ends[cursor:stop] = begins[cursor:stop] + 1
    rows = offsets[1:-1]
    return Order(tuple(np.split(begins, rows)), tuple(np.split(ends, rows)), played.ready.astype(np.int64))
