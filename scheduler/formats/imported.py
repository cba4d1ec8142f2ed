"""What an importer returns, and what all importers share: placement and numbers from the actions that are there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipert.scheduler.errors import FormatError, LayoutError
from pipert.scheduler.placement import Placement
from pipert.scheduler.program import Program
from pipert.scheduler.row import ActionRow
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.semantics import Semantics


@dataclass(frozen=True)
class Imported:
    """A schedule or program from another system's file.

    Attributes:
        value: what was read; like any schedule or program it may be wrong, which `verify` tells.
        notices: what the file has that pipert leaves out, and what of it is read in an unusual way, in words.
    """

    value: Schedule | Program
    notices: tuple[str, ...] = ()


def notice(left_out: Counter[str], reason: str) -> tuple[str, ...]:
    """One notice about everything that was left out, if anything was."""
    counts = ", ".join(f"{count} {word}" for word, count in left_out.items())
    return (f"left out: {counts}; {reason}",) if counts else ()


def assembled(name: str, rows: Sequence[ActionRow], semantics: Semantics) -> Schedule | Program:
    """A schedule if all actions compute, else a program for `semantics`.

    A stage belongs to the rank that has most of its actions; the number of micro-batches is the highest plus one.

    Raises:
        FormatError: there is no action, or a rank or a stage without one.
    """
    owners = _owners(rows)
    if not owners:
        raise FormatError("there is no action in the file; write one row of actions for each rank")
    absent = next((number for number, stage in enumerate(sorted(owners)) if number != stage), None)
    if absent is not None:
        raise FormatError(f"stage {absent} has no action, a later one has; number the stages from 0 without gaps")
    try:
        placement = Placement.of(owners[stage] for stage in sorted(owners))
    except LayoutError as error:
        raise FormatError(f"a row without a stage of its own: {error}") from error
    if len(rows) != placement.num_ranks:
        raise FormatError(f"{len(rows)} rows, but only {placement.num_ranks} ranks own a stage; leave out the others")
    microbatches = 1 + max(int(row.microbatches.max(initial=0)) for row in rows)
    schedule = Schedule(name, placement, microbatches, tuple(row.computations() for row in rows))
    return schedule if schedule.rows == tuple(rows) else Program(schedule, semantics, tuple(rows))


def _owners(rows: Sequence[ActionRow]) -> dict[int, int]:
    """The rank of every stage; where ranks have equally many of its actions, that with the fewest stages."""
    claims: dict[int, list[tuple[int, int, int]]] = {}
    for rank, row in enumerate(rows):
        stages, counts = np.unique(row.stages, return_counts=True)
        for stage, count in zip(stages.tolist(), counts.tolist(), strict=True):
            claims.setdefault(stage, []).append((-count, len(stages), rank))
    return {stage: min(claimed)[2] for stage, claimed in claims.items()}
