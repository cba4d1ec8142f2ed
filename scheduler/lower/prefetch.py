"""Pass: post receives earlier, so that a message can arrive while its rank still computes something else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pipert.scheduler.dependencies import TELLS
from pipert.scheduler.lower.groups import makes_groups
from pipert.scheduler.lower.messages import (
    IS_MESSAGE,
    IS_SEND,
    NONE,
    feeding,
    kinds_of,
    microbatches_of,
    peers_of,
    stages_of,
)
from pipert.scheduler.program import Program
from pipert.scheduler.row import ActionRow, Codes, pack


def prefetch_receives(program: Program, computations: int) -> Program:
    """Post each RECV that many computations before the one that needs it, or as close to that as is safe.

    A computation needs at most one message, so at most `computations` receive buffers more are live at any time.
    Operations that share a queue, or are matched by order, keep their order, and so does a whole row where neighbours
    may become a group. Where a RECV holds its rank, and where a RECV waits for its sizes, posting early could wait for
    something that this rank has yet to do, so these stay where they are.
    """
    if computations == 0 or program.semantics.blocking:
        return program
    return replace(program, rows=tuple(_moved(row.codes, program, computations) for row in program.rows))


def _moved(codes: Codes, program: Program, ahead: int) -> ActionRow:
    """Move the receives of one row. A message's place is the number of computations before it."""
    is_message = IS_MESSAGE[kinds_of(codes)]
    places = np.cumsum(~is_message)
    earliest, needed = places[is_message], _consumers(codes, is_message)
    moves = needed != NONE
    earliest[moves] = np.minimum(earliest[moves], np.maximum(needed[moves] - ahead, 0))
    keys = 2 * places - 1  # a computation comes behind the messages of its place
    keys[is_message] = 2 * _in_queues(earliest, _queues(codes[is_message], program))
    return ActionRow.from_codes(codes[np.argsort(keys, kind="stable")])


def _consumers(codes: Codes, is_message: Codes) -> Codes:
    """For each message the number of computations before the one it feeds; NONE if it may not move."""
    messages, needs = codes[is_message], feeding(codes[~is_message])
    by_code = np.argsort(needs, kind="stable")
    found = by_code[np.minimum(np.searchsorted(needs, messages, sorter=by_code), len(needs) - 1)]
    told = [
        pack(stages_of(metas), message, microbatches_of(metas))
        for meta, message in TELLS.items()
        for metas in [messages[kinds_of(messages) == meta]]
    ]
    may_move = (needs[found] == messages) & ~np.isin(messages, np.concatenate(told))
    return np.where(may_move, found, NONE)


def _queues(messages: Codes, program: Program) -> Codes:
    """The queue of each message; messages of one queue keep their order."""
    semantics = program.semantics
    if makes_groups(semantics) or semantics.channel == "rank":
        return np.zeros_like(messages)
    if semantics.channel == "message" and semantics.matching == "tag":
        return np.arange(len(messages))
    peers = peers_of(messages, program.placement)
    return peers if semantics.channel == "pair" else 2 * peers + IS_SEND[kinds_of(messages)]


def _in_queues(earliest: Codes, queues: Codes) -> Codes:
    """The earliest places that keep the order of every queue: in each, the running maximum."""
    by_queue = np.argsort(queues, kind="stable")
    step = int(earliest.max(initial=0)) + 1
    base = queues[by_queue] * step
    result = np.empty_like(earliest)
    result[by_queue] = np.maximum.accumulate(base + earliest[by_queue]) - base
    return result
