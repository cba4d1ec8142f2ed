"""Pass: add the messages that tell the sizes of other messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from pipert.scheduler.dependencies import TELLS
from pipert.scheduler.errors import LayoutError
from pipert.scheduler.lower.messages import kinds_of, microbatches_of, stages_of
from pipert.scheduler.program import Program
from pipert.scheduler.row import ActionRow, Codes, distinct, pack


def add_sizes(program: Program, microbatches: Iterable[int]) -> Program:
    """Put SEND_META and RECV_META directly before the forward messages of some micro-batches, on both their ranks.

    Raises:
        LayoutError: a micro-batch is out of range.
    """
    wanted = distinct(np.fromiter(microbatches, dtype=np.int64))
    if len(wanted) == 0:
        return program
    if wanted[0] < 0 or wanted[-1] >= program.microbatches:
        raise LayoutError(
            f"meta = {wanted.tolist()} names a micro-batch outside 0 .. {program.microbatches - 1}; "
            "name the micro-batches whose sizes travel ahead of them"
        )
    return replace(program, rows=tuple(_with_sizes(row.codes, wanted) for row in program.rows))


def _with_sizes(codes: Codes, wanted: Codes) -> ActionRow:
    for meta, message in TELLS.items():
        told = np.flatnonzero((kinds_of(codes) == message) & np.isin(microbatches_of(codes), wanted))
        codes = np.insert(codes, told, pack(stages_of(codes[told]), meta, microbatches_of(codes[told])))
    return ActionRow.from_codes(codes)
