"""Pass: move activations to host memory while they wait for their backward."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from pipert.scheduler.action import Action, Kind
from pipert.scheduler.errors import LayoutError
from pipert.scheduler.lower.messages import IS_COMPUTE, kinds_of
from pipert.scheduler.placement import is_whole
from pipert.scheduler.program import Program
from pipert.scheduler.row import ActionRow


def add_offloads(program: Program, keep: Mapping[int, int]) -> Program:
    """Let at most so many micro-batches of a stage keep their activations on the device, beside one that computes.

    When a forward makes one too many, the one whose backward is furthest away is moved out (OFFLOAD); when a backward
    has made room, the one whose backward is next comes back (RELOAD). So both copies overlap with the computations
    between. Each micro-batch is moved at most once. Stage 0 of 1F1B on 4 ranks, 1 kept::

        0F0 0F1 0OFFLOAD1 0F2 0OFFLOAD2 0F3 0OFFLOAD3 0B0 0RELOAD1 0F4 0OFFLOAD4 0B1 0RELOAD2 ...

    Both stand before the next computation, behind the messages in between, so that messages that start together stay
    neighbours.

    Args:
        program: with all computations and messages in their order.
        keep: for each stage that offloads how many micro-batches stay, 1 or more. Stages without a backward keep
            nothing anyhow.

    Raises:
        LayoutError: there is no such stage, or less than one stays.
    """
    for stage, number in keep.items():
        if stage not in range(program.num_stages) or not is_whole(number) or number < 1:
            raise LayoutError(
                f"offload = {{{stage!r}: {number!r}}}: give for stages of 0 .. {program.num_stages - 1} how many "
                "micro-batches stay on the device, 1 or more"
            )
    trained = {stage: number for stage, number in keep.items() if stage >= program.trainable_from}
    return replace(program, rows=tuple(_moved(row, trained) for row in program.rows)) if trained else program


def _moved(row: ActionRow, keep: Mapping[int, int]) -> ActionRow:
    places = np.flatnonzero(IS_COMPUTE[kinds_of(row.codes)]).tolist()
    computations = [row[place] for place in places]
    backwards: dict[tuple[int, int], int] = {}
    for turn, action in enumerate(computations):
        if action.kind in (Kind.B, Kind.I):
            backwards[action.stage, action.microbatch] = turn
    stages = {stage: _Stage(stage, number) for stage, number in keep.items()}
    added: list[tuple[int, Action]] = []
    for turn, action in enumerate(computations):
        if action.stage not in stages:
            continue
        after = places[turn + 1] if turn + 1 < len(places) else len(row)
        place = places[turn] if action.kind in (Kind.B, Kind.I) else after
        urgent = stages[action.stage].before(action)
        added += [(place, one) for one in urgent]
        added += [(after, one) for one in stages[action.stage].behind(action, turn, backwards)]
    where = [place for place, _ in added]
    return ActionRow.from_codes(np.insert(row.codes, where, [one.code for _, one in added])) if added else row


@dataclass
class _Stage:
    """The micro-batches of one stage while its computations run.

    Attributes:
        number: which stage.
        keep: how many may stay.
        here: those on the device.
        movable: those of them that were never moved, the one whose backward is last first: (-turn, micro-batch).
        away: those in host memory, the one whose backward is next first: (turn, micro-batch).
    """

    number: int
    keep: int
    here: set[int] = field(default_factory=set)
    movable: list[tuple[int, int]] = field(default_factory=list)
    away: list[tuple[int, int]] = field(default_factory=list)

    def before(self, action: Action) -> Iterator[Action]:
        """What must come back at once, because its backward is next."""
        if action.kind in (Kind.B, Kind.I) and action.microbatch not in self.here and self.away:
            yield self._bring()

    def behind(self, action: Action, turn: int, backwards: Mapping[tuple[int, int], int]) -> Iterator[Action]:
        """What moves when a computation is over."""
        microbatch = action.microbatch
        if action.kind is Kind.F and (self.number, microbatch) in backwards:
            self.here.add(microbatch)
            heapq.heappush(self.movable, (-backwards[self.number, microbatch], microbatch))
            yield from self._move_out(turn)
        elif action.kind in (Kind.B, Kind.W):
            self.here.discard(microbatch)
            while self.away and len(self.here) < self.keep:
                yield self._bring()

    def _move_out(self, turn: int) -> Iterator[Action]:
        while self.movable and len(self.here) > self.keep:
            order, microbatch = heapq.heappop(self.movable)
            if -order > turn:  # else only its W is to come, which needs no activations
                self.here.remove(microbatch)
                heapq.heappush(self.away, (-order, microbatch))
                yield Action(self.number, Kind.OFFLOAD, microbatch)

    def _bring(self) -> Action:
        _, microbatch = heapq.heappop(self.away)
        self.here.add(microbatch)
        return Action(self.number, Kind.RELOAD, microbatch)
