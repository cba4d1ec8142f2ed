"""Pass: gather the weights of a stage before it computes, and free them when other stages do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pipert.scheduler.action import Kind
from pipert.scheduler.lower.messages import IS_COMPUTE, kinds_of, stages_of
from pipert.scheduler.program import Program
from pipert.scheduler.row import ActionRow, Codes, distinct, pack


def add_gathers(program: Program, once: bool = False) -> Program:
    """Put each run of computations of a stage between a GATHER and a FREE.

    The GATHER stands one computation ahead of the run, so that it overlaps with that one. Then the weights of at most
    two stages are whole on a rank at a time: those of the stage that computes, and those of the next one; the more
    stages a rank has, the less memory it needs. Weights that would be gathered again at once stay.

    ::

        0F0 1F0 2F0   ->   0GATHER0 1GATHER0 0F0 0FREE0 2GATHER0 1F0 1FREE0 2F0 2FREE0

    Args:
        program: with all computations in their order.
        once: gather everything at the beginning and free it at the end: an order that does not depend on the number of
            micro-batches.
    """
    return replace(program, zero=3, rows=tuple(_gathered(row.codes, once) for row in program.rows))


def _gathered(codes: Codes, once: bool) -> ActionRow:
    places = np.flatnonzero(IS_COMPUTE[kinds_of(codes)])
    if not len(places):
        return ActionRow.from_codes(codes)
    if once:
        stages = distinct(stages_of(codes[places]))
        first, last = np.zeros_like(stages), np.full_like(stages, len(places) - 1)
    else:
        stages, first, last = _spans(stages_of(codes[places]))
    starts = np.flatnonzero(np.diff(stages, prepend=-1))
    numbers = np.arange(len(stages)) - np.repeat(starts, np.diff(starts, append=len(stages)))
    frees, gathers = pack(stages, Kind.FREE, numbers), pack(stages, Kind.GATHER, numbers)
    behind, before = np.argsort(last, kind="stable"), np.argsort(first, kind="stable")
    # What is freed behind a computation goes before what is gathered for the next one.
    where = np.concatenate([places[last[behind]] + 1, places[first[before]]])
    return ActionRow.from_codes(np.insert(codes, where, np.concatenate([frees[behind], gathers[before]])))


def _spans(stages: Codes) -> tuple[Codes, Codes, Codes]:
    """Stage, first and last computation of each span in which its weights are whole, by stage and in order."""
    begins = np.flatnonzero(np.diff(stages, prepend=-1))
    first = np.maximum(begins - 1, 0)  # one computation ahead
    last = np.append(begins[1:], len(stages)) - 1
    by_stage = np.argsort(stages[begins], kind="stable")
    owner, first, last = stages[begins][by_stage], first[by_stage], last[by_stage]
    goes_on = (owner[1:] == owner[:-1]) & (first[1:] <= last[:-1] + 1)
    opens, closes = np.append(True, ~goes_on), np.append(~goes_on, True)
    return owner[opens], first[opens], last[closes]
