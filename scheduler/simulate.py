"""`simulate`: when everything happens, given what everything costs."""

from __future__ import annotations

import numpy as np

from pipert.scheduler.action import KIND_MASK, KIND_SHIFT, Kind
from pipert.scheduler.costs import Costs
from pipert.scheduler.dependencies import MAKES
from pipert.scheduler.errors import DeadlockError, UnsafeProgramError
from pipert.scheduler.index import flatten, index, is_sparse, usable_actions
from pipert.scheduler.play import PlayedSchedule, run_program, run_schedule
from pipert.scheduler.program import Program
from pipert.scheduler.row import Codes
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.timeline import Timeline
from pipert.scheduler.verify import verify
from pipert.scheduler.waits import schedule_deadlock
from pipert.scheduler.wiring import wire
from pipert.scheduler.worklist import Ints


def simulate(target: Schedule | Program, costs: Costs, *, blocking: bool = False) -> Timeline:
    """Run a schedule or program in time; exact, O(actions).

    A schedule's action starts when its rank is free and its needs are there; a value from another rank is there
    ``costs.comm`` after it was made, and computing goes on meanwhile. A program runs by its own semantics: a message
    starts when both ends have posted it (a buffered one as soon as it is sent) and lasts ``costs.comm``; what is
    queued behind it waits; a blocking end holds its rank; collectives take ``costs.reduce`` and ``costs.tie`` (the
    longest of its stages).

    Args:
        target: the schedule, or the program.
        costs: how long things take.
        blocking: of a schedule: the rank that sends is held for ``costs.comm`` too.

    Raises:
        DeadlockError: actions wait for one another; the message names them.
        UnsafeProgramError: the target is malformed; the message shows where. (A schedule may lack actions that nobody
            waits for, as one of forwards alone does.)
        CostError: the costs are for another number of stages.
    """
    if isinstance(target, Program):
        return _simulate_program(target, costs)
    table = costs.table(target.num_stages)
    codes, offsets = flatten(target.rows)
    if not _is_in_range(target, codes, offsets):
        verify(target).require()
    owners = np.asarray(target.placement.owners, dtype=np.int64)
    played = run_schedule(codes, offsets, owners, target.microbatches, table, table[Kind.SEND_F], blocking)
    if not played.finished:
        raise DeadlockError(schedule_deadlock(index(target), played).words)
    if _does_twice(codes, played):
        verify(target).require()
    return Timeline(target.name, offsets, codes, played.begins, played.ends)


def _is_in_range(schedule: Schedule, codes: Codes, offsets: Ints) -> bool:
    """Whether the schedule can be indexed at all."""
    places = schedule.num_stages * schedule.microbatches
    if len(schedule.rows) != schedule.placement.num_ranks or places < 1 or is_sparse(places, len(codes)):
        return False
    return bool(usable_actions(codes, offsets, schedule).all())


def _does_twice(codes: Codes, played: PlayedSchedule) -> bool:
    """Whether fewer values are there than the actions made: then some of them were made again."""
    times = np.bincount(codes >> KIND_SHIFT & KIND_MASK, minlength=len(MAKES))
    made = sum(int(times[kind]) * len(values) for kind, values in MAKES.items())
    return int(np.count_nonzero(played.ready >= 0)) < made


def _simulate_program(program: Program, costs: Costs) -> Timeline:
    table = costs.table(program.num_stages)
    proof = verify(program)
    if not proof.ok:
        raise (DeadlockError if proof.faults[0].rule == "deadlock" else UnsafeProgramError)(str(proof))
    where = index(program)
    played = run_program(wire(where, program), table)
    return Timeline(program.schedule.name, where.offsets, where.codes, played.begins, played.ends)
