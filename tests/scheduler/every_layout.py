"""Every generator on 1 to 16 ranks, with 1 to 4 stages a rank where it takes them, and 1 to 40 micro-batches."""

from __future__ import annotations

import random
from typing import NamedTuple

from pipert.scheduler.costs import Costs
from pipert.scheduler.generators.registry import GENERATORS, generate
from pipert.scheduler.lower import lower
from pipert.scheduler.semantics import MPI, MPI_SYNCHRONOUS, NCCL_PAIR
from pipert.scheduler.simulate import simulate
from pipert.scheduler.verify import verify

#: The strictest use of MPI among them: no send is complete before its receive has begun.
TRANSPORTS = (MPI, MPI_SYNCHRONOUS, NCCL_PAIR)
COSTS = Costs(1, 2, comm=0.125)


class Layout(NamedTuple):
    """One schedule of one generator."""

    name: str
    ranks: int
    microbatches: int
    chunks: int


def layouts() -> list[Layout]:
    """All of them, mixed, so that every part of the list has small and large ones of every generator."""
    every = [
        Layout(name, ranks, microbatches, chunks)
        for name, entry in GENERATORS.items()
        for ranks in range(1, 17)
        for chunks in ((1, 2, 3, 4) if entry.chunked else (1,))
        for microbatches in range(1, 41)
    ]
    random.Random(0).shuffle(every)
    return every


def prove(layout: Layout) -> int:
    """Prove and simulate a schedule and its programs; returns how many actions the programs have.

    Raises:
        UnsafeProgramError: one of them is not safe.
    """
    schedule = generate(*layout)
    verify(schedule).require()
    alone, actions = simulate(schedule, COSTS), 0
    for semantics in TRANSPORTS:
        program = lower(schedule, semantics)
        verify(program).require()
        assert simulate(program, COSTS).makespan >= alone.makespan - 1e-9, f"{layout}: messages make it faster"
        actions += sum(map(len, program.rows))
    return actions
