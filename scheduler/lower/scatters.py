"""Pass: sum the gradients of each micro-batch over the replicas at once, so that only a shard of the sum lives on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pipert.scheduler.action import Kind
from pipert.scheduler.dependencies import ADDS_WEIGHT
from pipert.scheduler.lower.messages import kinds_of, microbatches_of, next_computations, stages_of
from pipert.scheduler.program import Program
from pipert.scheduler.row import ActionRow, Codes, pack


def add_scatters(program: Program) -> Program:
    """Add a SCATTER behind each weight gradient, and behind the messages that follow it.

    Its place among the computations depends on the schedule alone, so replicas with as many micro-batches agree on the
    order of all their SCATTERs.

    ::

        0F0 0B0 0F1 0B1   ->   0F0 0B0 0SCATTER0 0F1 0B1 0SCATTER1
    """
    return replace(program, rows=tuple(_scattered(row.codes) for row in program.rows))


def _scattered(codes: Codes) -> ActionRow:
    made = np.flatnonzero(np.isin(kinds_of(codes), ADDS_WEIGHT))
    scatters = pack(stages_of(codes[made]), Kind.SCATTER, microbatches_of(codes[made]))
    return ActionRow.from_codes(np.insert(codes, next_computations(codes)[made + 1], scatters))
