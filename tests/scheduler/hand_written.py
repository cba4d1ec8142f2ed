"""Schedules and programs written by hand, for tests that need an exact one."""

from __future__ import annotations

from pipert.scheduler.placement import Placement
from pipert.scheduler.program import Program
from pipert.scheduler.row import ActionRow
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.semantics import MPI, Semantics
from pipert.scheduler.verify import Proof

#: The rows of a right schedule for two ranks and two micro-batches.
GOOD = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")


def schedule(placement: str, microbatches: int, *rows: str) -> Schedule:
    owners = Placement.of(map(int, placement.split()))
    return Schedule.of("hand-written", owners, microbatches, map(ActionRow.parse, rows))


def program(placement: str, microbatches: int, *rows: str, semantics: Semantics = MPI, **options: object) -> Program:
    parsed = tuple(map(ActionRow.parse, rows))
    computed = schedule(placement, microbatches, *(str(row.computations()) for row in parsed))
    return Program(computed, semantics, parsed, **options)  # type: ignore[arg-type]


def places(proof: Proof) -> list[tuple[str, int | None, int | None, str]]:
    return [(fault.rule, fault.rank, fault.index, str(fault.action)) for fault in proof.faults]


#: Two ranks that first send what the other needs and then receive: stage 1 of micro-batch 0 goes back to rank 0.
CROSSING = (
    "0F0 0SEND_F0 0F1 0SEND_F1 2RECV_F0 2F0 2RECV_F1 2F1",
    "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1",
)


def crossing(semantics: Semantics, groups: tuple[tuple[tuple[int, int], ...], ...] = ()) -> Program:
    return program("0 1 0", 2, *CROSSING, semantics=semantics, groups=groups, trainable_from=3)
