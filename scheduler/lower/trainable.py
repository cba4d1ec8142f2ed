"""Pass: drop the backwards of stages that have nothing to train."""

from __future__ import annotations

from dataclasses import replace

from pipert.scheduler.action import Kind
from pipert.scheduler.program import Program
from pipert.scheduler.row import ActionRow


def drop_frozen(program: Program) -> Program:
    """Drop every backward of the stages below ``program.trainable_from``.

    ``trainable_from = num_stages`` leaves the forwards only: an evaluation.
    """
    if program.trainable_from == 0:
        return program
    return replace(program, rows=tuple(_kept(row, program.trainable_from) for row in program.rows))


def _kept(row: ActionRow, trainable_from: int) -> ActionRow:
    return ActionRow.from_codes(row.codes[(row.kinds == Kind.F) | (row.stages >= trainable_from)])
