"""Pass: let two messages that cross each other start together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pipert.scheduler.dependencies import TELLS
from pipert.scheduler.lower.messages import IS_MESSAGE, IS_SEND, kinds_of, peers_of
from pipert.scheduler.program import Program, Span
from pipert.scheduler.row import Codes
from pipert.scheduler.semantics import Semantics


def makes_groups(semantics: Semantics) -> bool:
    """Whether the two messages of an exchange would go one after the other, and need not: groups are of use."""
    return semantics.grouped and (semantics.blocking or semantics.channel in ("pair", "rank"))


def group_exchanges(program: Program) -> Program:
    """Group each SEND and RECV with one peer that stand side by side: the exchange of 1F1B's steady phase.

    Without a group they would go one after the other in their queue, or hold their rank one after the other. A group is
    complete as a whole, so anything more in it would only make messages wait for each other that need not, and where
    nothing is queued any group would. These two can wait for each other: all ranks have them in one order (or the rank
    waits for both in any case), so what the peer does before it posts the second does not need the first.
    """
    if not makes_groups(program.semantics):
        return program
    return replace(program, groups=tuple(_exchanges(row.codes, program) for row in program.rows))


def _exchanges(codes: Codes, program: Program) -> tuple[Span, ...]:
    kinds = kinds_of(codes)
    data = np.flatnonzero(IS_MESSAGE[kinds] & ~np.isin(kinds, list(TELLS)))
    peers, sends = peers_of(codes[data], program.placement), IS_SEND[kinds[data]]
    crossing = (np.diff(data) == 1) & (peers[1:] == peers[:-1]) & (sends[1:] != sends[:-1])
    # In a run of candidates that overlap (send, receive, send, …) take every other one.
    candidates = np.flatnonzero(crossing)
    run_starts = np.flatnonzero(np.diff(candidates, prepend=-2) > 1)
    place_in_run = np.arange(len(candidates)) - np.repeat(run_starts, np.diff(run_starts, append=len(candidates)))
    starts = data[candidates[place_in_run % 2 == 0]].tolist()
    return tuple((start, start + 2) for start in starts)
