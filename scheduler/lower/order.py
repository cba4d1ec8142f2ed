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
from pipert.scheduler.compiled import compiled
from pipert.scheduler.dependencies import ValueKind, makes_table, needs_table
from pipert.scheduler.program import Program
from pipert.scheduler.row import Codes
from pipert.scheduler.worklist import play_schedule

Times = npt.NDArray[np.int64]

#: The durations that the run is simulated with. Any would be safe; these are close to a transformer's.
DURATIONS = {Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1}


@dataclass(frozen=True, eq=False)
class Order:
    """When everything happens in the simulated run.

    Attributes:
        begins: for every rank when each of its computations starts.
        ends: for every rank when each of its computations ends.
        ready: when each value is there, ``[value kind, stage, micro-batch]``.
    """

    begins: tuple[Times, ...]
    ends: tuple[Times, ...]
    ready: Times


def simulated_order(program: Program) -> Order:
    """Simulate a program that has only computations so far, with messages that take no time.

    What can never happen (the verifier will say why) is put at the end of its row.
    """
    offsets = np.cumsum([0, *map(len, program.rows)])
    codes = np.concatenate([row.codes for row in program.rows])
    stages, count = program.num_stages, len(codes)
    durations = np.zeros((len(DURATIONS), stages))
    for kind, duration in DURATIONS.items():
        durations[kind] = duration
    begins, ends = np.full(count, -1.0), np.full(count, -1.0)
    ready = np.full((len(ValueKind), stages, program.microbatches), -1.0)
    ready_flat = ready.reshape(-1)
    compiled(play_schedule, count)(
        offsets,
        codes,
        np.array(program.placement.owners),
        needs_table().reshape(-1),
        makes_table().reshape(-1),
        program.microbatches,
        durations.reshape(-1),
        np.zeros(durations.size),
        np.zeros(stages),
        begins,
        ends,
        ready_flat,
        offsets[:-1].copy(),
        np.full(program.num_ranks, -1),
    )
    stuck = begins < 0
    begins[stuck] = 4 * count + 2 * np.flatnonzero(stuck)
    ends[stuck] = begins[stuck] + 1
    return Order(_by_rank(begins, offsets), _by_rank(ends, offsets), ready.astype(np.int64))


def _by_rank(times: npt.NDArray[np.float64], offsets: Codes) -> tuple[Times, ...]:
    return tuple(np.split(times.astype(np.int64), offsets[1:-1]))
