"""Message tags: the running number of a message from one rank to another, counted in the sender's program."""

from __future__ import annotations

import numpy as np

from pipert.errors import ConfigError
from pipert.scheduler.action import Action
from pipert.scheduler.lower.messages import IS_MESSAGE, IS_SEND, OFFSET, counterparts, kinds_of, stages_of
from pipert.scheduler.program import Program
from pipert.scheduler.row import Codes


def message_tags(program: Program, rank: int, bound: int) -> dict[int, int]:
    """The tag of each message of a rank's row, by packed action.

    Both ends derive the same tag, because both know the whole program. Numbers start again with every step: by then all
    messages of the step before are complete.

    Args:
        program: a proved program.
        rank: whose messages.
        bound: tags are below it; numbers beyond start again from 0.

    Raises:
        ConfigError: so many messages are under way that two with the same tag could be mistaken for each other.
    """
    tags: dict[int, int] = {}
    sends, targets = _sends(program, rank)
    for peer in np.unique(targets).tolist():
        codes = sends[targets == peer]
        tags.update(zip(codes.tolist(), (np.arange(len(codes)) % bound).tolist(), strict=True))
    row = program.rows[rank].codes
    receives = row[IS_MESSAGE[kinds_of(row)] & ~IS_SEND[kinds_of(row)]]
    sources = _owners(program)[stages_of(receives) + OFFSET[kinds_of(receives)]]
    for peer in np.unique(sources).tolist():
        mine = receives[sources == peer]
        theirs, to = _sends(program, peer)
        numbers = _positions(theirs[to == rank], counterparts(mine))
        _check_order(numbers, mine, bound)
        tags.update(zip(mine.tolist(), (numbers % bound).tolist(), strict=True))
    return tags


def _owners(program: Program) -> Codes:
    return np.array(program.placement.owners)


def _sends(program: Program, rank: int) -> tuple[Codes, Codes]:
    """The sends of a row in order, and the rank to which each goes."""
    row = program.rows[rank].codes
    sends = row[IS_SEND[kinds_of(row)]]
    return sends, _owners(program)[stages_of(sends) + OFFSET[kinds_of(sends)]]


def _positions(haystack: Codes, needles: Codes) -> Codes:
    order = np.argsort(haystack)
    return order[np.searchsorted(haystack, needles, sorter=order)]


def _check_order(numbers: Codes, receives: Codes, bound: int) -> None:
    """Messages with one tag must be received in the order in which they are sent."""
    if len(numbers) <= bound:
        return
    for tag in range(bound):
        wrong = np.flatnonzero(np.diff(numbers[tag == numbers % bound]) < 0)
        if len(wrong):
            first = Action.from_code(int(receives[tag == numbers % bound][wrong[0]]))
            raise ConfigError(
                f"{len(numbers)} messages between two ranks, but only {bound} tags: {first} could get another message; "
                "use fewer micro-batches in a step, or a transport with more tags"
            )
