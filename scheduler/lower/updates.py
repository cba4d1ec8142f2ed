"""Passes about the update of the weights: a program of its own, or STEPs within the step's program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pipert.scheduler.action import Action, Kind
from pipert.scheduler.dependencies import ADDS_WEIGHT, SUMS
from pipert.scheduler.errors import LayoutError
from pipert.scheduler.lower.messages import kinds_of, microbatches_of, next_computations, stages_of
from pipert.scheduler.placement import Placement
from pipert.scheduler.program import Program
from pipert.scheduler.row import ActionRow, Codes, distinct
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.semantics import Semantics

_ADDS = (*SUMS, *ADDS_WEIGHT)


def update_program(
    placement: Placement, semantics: Semantics, parts: Sequence[Kind] = (Kind.NORM, Kind.STEP), *, zero: int = 0
) -> Program:
    """An update of the weights, without micro-batches.

    ::

        rank 0: 0NORM 0STEP 0GATHER0            ZeRO stages 1 and 2; else without GATHER
        rank 1: 1NORM 1STEP 1GATHER0

    Args:
        placement: the rank of every stage.
        semantics: the transport's message rules.
        parts: what it does, in this order: NORM, UNDO, STEP. For each stage what it does to the weights stands together
            with the GATHER that fetches the others' shards, so that this overlaps with the next stage's.
        zero: the ZeRO stage over the replicas.

    Raises:
        LayoutError: a part is none.
    """
    if not set(parts) <= {Kind.NORM, Kind.UNDO, Kind.STEP}:
        raise LayoutError(f"parts = {parts} of an update must be of NORM, UNDO and STEP")
    changes = [kind for kind in parts if kind is not Kind.NORM]
    gathers = [Kind.GATHER] if changes and zero in (1, 2) else []
    rows = []
    for rank in range(placement.num_ranks):
        own = placement.stages_of(rank)
        norm = [Action(own[0], Kind.NORM)] if Kind.NORM in parts else []
        rows.append(ActionRow([*norm, *(Action(stage, kind) for stage in own for kind in (*changes, *gathers))]))
    nothing = tuple(ActionRow() for _ in rows)
    return Program(Schedule("update", placement, 0, nothing), semantics, tuple(rows), zero=zero)


def add_steps(program: Program, at_end: bool = False) -> Program:
    """Put each stage's STEP behind all that adds to its gradients: an update without a barrier over the ranks.

    A stage's sums have one more computation to overlap with, where there is one. A stage with tied weights steps
    behind their sums, which are the last thing in a row. Where STEPs update shards a GATHER stands behind each.

    Args:
        program: with all sums.
        at_end: put all of them at the end: an order that does not depend on the number of micro-batches.
    """
    rows = tuple(_stepped(row.codes, program, at_end) for row in program.rows)
    return replace(program, rows=rows)


def _stepped(codes: Codes, program: Program, at_end: bool) -> ActionRow:
    following, places = next_computations(codes), []
    adding = np.isin(kinds_of(codes), _ADDS)
    own = distinct(stages_of(codes[adding])).tolist()
    for stage in own:
        adds = adding & (stages_of(codes) == stage)
        ties = [tie for tie, copies in enumerate(program.ties) if stage in copies]
        tied = (kinds_of(codes) == Kind.TIE) & np.isin(microbatches_of(codes), ties)
        last = int(np.flatnonzero(adds | tied).max(initial=-1)) + 1
        one_more = int(following[last])
        places.append(len(codes) if at_end or tied.any() else int(following[min(one_more + 1, len(codes))]))
    behind = [Kind.STEP, *([Kind.GATHER] if program.zero in (1, 2) else [])]
    for place, stage in sorted(zip(places, own, strict=True), key=lambda pair: (-pair[0], pair[1])):
        codes = np.insert(codes, place, [Action(stage, kind).code for kind in behind])
    return ActionRow.from_codes(codes)
