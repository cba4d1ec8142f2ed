"""Pass: add the sums over replicas and over tied weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pipert.scheduler.action import Action, Kind
from pipert.scheduler.dependencies import ADDS_WEIGHT
from pipert.scheduler.errors import LayoutError
from pipert.scheduler.lower.messages import carrying, kinds_of, stages_of
from pipert.scheduler.program import Program
from pipert.scheduler.row import ActionRow, Codes


def add_reductions(program: Program, reduce: bool) -> Program:
    """Add a TIE for each copy of a tied weight and, if asked, a REDUCE for each trainable stage.

    * The REDUCE of a stage stands behind the stage's last weight gradient (and its SEND_B), so it overlaps the rest of
      the step. The stages of a rank follow one another from the last to the first: the order in which they finish,
      whatever the number of micro-batches, so replicas always agree.
    * Ties come at the end of every row, in their order, so no rank can wait for a tie while another waits for it. They
      can hardly come earlier: a tie needs the last backward of its first stage. No REDUCE waits for them, since it
      leaves tied weights to their TIE, which sums over the replicas too.
    """
    ties = _trained_ties(program)
    rows = tuple(_reduced(row.codes, program, rank, ties, reduce) for rank, row in enumerate(program.rows))
    return replace(program, rows=rows)


def _trained_ties(program: Program) -> list[int]:
    """The ties whose stages are trained.

    Raises:
        LayoutError: a tie names a stage that is not there, fewer than two stages, or one twice; or some of its
            stages are trained and some are not.
    """
    trained_ties = []
    for tie, stages in enumerate(program.ties):
        if len(stages) < 2 or len(set(stages)) < len(stages) or not set(stages) <= set(range(program.num_stages)):
            raise LayoutError(
                f"ties[{tie}] = {stages} must name two or more different stages of 0 .. {program.num_stages - 1}, "
                "each with a copy of the weight"
            )
        trained = [stage >= program.trainable_from for stage in stages]
        if any(trained) and not all(trained):
            raise LayoutError(
                f"ties[{tie}] = {stages} has stages below trainable_from = {program.trainable_from}, which get no "
                "gradient; the copies of a trained weight are all trained: lower trainable_from, or leave out the tie"
            )
        if all(trained):
            trained_ties.append(tie)
    return trained_ties


def _reduced(codes: Codes, program: Program, rank: int, ties: list[int], reduce: bool) -> ActionRow:
    added: list[tuple[int, Action]] = []  # the place in the row, and what comes there
    finished, place = _finished(codes) if reduce else {}, 0
    for stage in sorted(finished, reverse=True):
        place = max(place, finished[stage])
        added.append((place, Action(stage, Kind.REDUCE)))
    own = program.placement.stages_of(rank)
    for tie in ties:
        added += [(len(codes), Action(stage, Kind.TIE, tie)) for stage in own if stage in program.ties[tie]]
    return ActionRow.from_codes(np.insert(codes, [place for place, _ in added], [action.code for _, action in added]))


def _finished(codes: Codes) -> dict[int, int]:
    """For each stage of a row the place behind its last weight gradient and the message that belongs to it."""
    makes_weight = np.flatnonzero(np.isin(kinds_of(codes), ADDS_WEIGHT))[::-1]
    stages, first = np.unique(stages_of(codes[makes_weight]), return_index=True)
    finished = {}
    for stage, last in zip(stages.tolist(), makes_weight[first].tolist(), strict=True):
        sent = np.flatnonzero(codes[last:] == carrying(codes[last : last + 1])[0])
        finished[stage] = last + 1 + (int(sent[0]) if len(sent) else 0)
    return finished
