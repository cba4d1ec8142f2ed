"""Pass: spread the vocabulary over all ranks of the pipeline.

It simulates the schedule, and lets each rank do its parts of embedding and head between the computations that the
schedule gives it: logits as soon as the hidden state is there, weight gradients when there is nothing else to do, or
when too much would be kept. The simulated run is itself a run of the rows that come out, by the rules of any transport
whose operations do not hold the rank: every collective is posted before it starts there, and they start in the order in
which they stand in every row. As what happens does not depend on timing, nothing can deadlock. Where operations hold
their rank, every collective stands where its start has it on all ranks (see `pipert.scheduler.lower.order`).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from dataclasses import replace

import numpy as np

from pipert.scheduler.action import Action, Kind
from pipert.scheduler.dependencies import GIVES, TAKES, ValueKind, makes, needs
from pipert.scheduler.errors import LayoutError
from pipert.scheduler.lower.order import Order
from pipert.scheduler.program import Program
from pipert.scheduler.row import ActionRow
from pipert.scheduler.vocabulary import home_stages

#: The durations that the run is simulated with, close to those of a large model; any would be safe.
DURATIONS = {Kind.F: 12, Kind.B: 24, Kind.I: 12, Kind.W: 12, Kind.S: 2, Kind.T: 1, Kind.G: 1}
COLLECTIVE = 1

#: A rank keeps the logits of at most so many micro-batches, and the embedding's gradients of as many.
KEPT = 2
#: The embedding of a micro-batch is summed so many of the first stage's forwards before it is needed.
AHEAD = 2


def spread_vocabulary(program: Program) -> tuple[Program, Order]:
    """Add what `Program.vocabulary` says to a program of computations alone.

    Returns:
        the program, and when everything in its rows happens in the simulated run.

    Raises:
        LayoutError: the embedding is trained, but some stages have no backward.
    """
    assert program.vocabulary is not None
    if program.vocabulary.embedding and program.trainable_from:
        raise LayoutError(
            f"the embedding is trained, but trainable_from = {program.trainable_from} lets no gradient get below that "
            "stage; use trainable_from = 0"
        )
    run = _Run(program)
    run.go()
    rows, begins, ends = [], [], []
    for rank in range(program.num_ranks):
        codes, starts, stops = run.row(rank)
        rows.append(ActionRow.from_codes(codes))
        begins.append(np.array(starts, dtype=np.int64))
        ends.append(np.array(stops, dtype=np.int64))
    return replace(program, rows=tuple(rows)), Order(tuple(begins), tuple(ends), run.ready)


class _Rank:
    """One rank in the simulated run.

    Attributes:
        rest: the schedule's computations that are to come.
        done: all computations that have begun, with `begins` and `ends`.
        places: for each collective that it has posted by itself, how many computations stand before it.
        logits, weights, scatters, totals: micro-batches of which S, T, G, SUM_H may run.
        kept: micro-batches whose logits it keeps.
    """

    def __init__(self, rest: list[Action]) -> None:
        self.rest = deque(rest)
        self.done: list[Action] = []
        self.begins: list[int] = []
        self.ends: list[int] = []
        self.places: dict[tuple[Kind, int], int] = {}
        self.logits: deque[int] = deque()
        self.weights: deque[int] = deque()
        self.scatters: deque[int] = deque()
        self.totals: deque[int] = deque()
        self.kept = 0

    def busy(self, now: int) -> bool:
        return bool(self.ends) and self.ends[-1] > now


class _Run:
    """The simulated run: ranks take what they may do next, time goes from event to event."""

    def __init__(self, program: Program) -> None:
        assert program.vocabulary is not None
        self.program = program
        self.kinds = program.vocabulary.kinds(program.trainable_from < program.num_stages)
        self.homes = home_stages(program.placement)
        self.ranks = [_Rank(list(row)) for row in program.rows]
        self.last = program.num_stages - 1
        self.ready = np.full((len(ValueKind), program.num_stages, program.microbatches), -1, dtype=np.int64)
        self.complete: set[tuple[Kind, int]] = set()
        self.parts: defaultdict[tuple[Kind, int], int] = defaultdict(int)
        self.fired: list[tuple[Kind, int, int]] = []
        self.events: list[tuple[int, int, Action | None, Kind, int]] = []
        self.lookups = deque(a.microbatch for row in program.rows for a in row if a[:2] == (0, Kind.F))
        self.now = 0

    def go(self) -> None:
        """Run until nothing happens any more."""
        for _ in range(AHEAD):
            self._look_up()
        self._start_all()
        while self.events:
            self.now = self.events[0][0]
            while self.events and self.events[0][0] == self.now:
                _, _, action, kind, microbatch = heapq.heappop(self.events)
                if action is None:
                    self._completed(kind, microbatch)
                else:
                    self._computed(action)
            self._start_all()

    def _start_all(self) -> None:
        for number, rank in enumerate(self.ranks):
            if not rank.busy(self.now):
                self._start(number, rank)

    # ---- what happens ----------------------------------------------------------------------------------------------

    def _fire(self, kind: Kind, microbatch: int) -> None:
        """A collective starts."""
        self.fired.append((kind, microbatch, self.now))
        heapq.heappush(self.events, (self.now + COLLECTIVE, len(self.fired), None, kind, microbatch))

    def _look_up(self) -> None:
        if self.lookups:
            self._fire(Kind.SUM_E, self.lookups.popleft())

    def _take_part(self, rank: _Rank, kind: Kind, microbatch: int) -> None:
        """A rank posts its part of a collective, which starts with the last one."""
        rank.places[kind, microbatch] = len(rank.done)
        self.parts[kind, microbatch] += 1
        if self.parts[kind, microbatch] == len(self.ranks):
            self._fire(kind, microbatch)

    def _completed(self, kind: Kind, microbatch: int) -> None:
        self.complete.add((kind, microbatch))
        for rank in self.ranks:
            if kind is Kind.CAST_H:
                rank.logits.append(microbatch)
            elif kind is Kind.CAST_E:
                rank.scatters.append(microbatch)
            elif kind is Kind.STATS:
                rank.totals += [microbatch] if Kind.SUM_H in self.kinds else []
                rank.weights += [microbatch] if Kind.T in self.kinds else []

    def _computed(self, action: Action) -> None:
        if action.kind is Kind.S:
            self._take_part(self.ranks[self.program.placement.owners[action.stage]], Kind.STATS, action.microbatch)
        if not action.kind.is_scheduled:
            return
        for value in makes(action):
            self.ready[value] = self.now
            for kind, (made, stage) in TAKES.items():
                if kind in self.kinds and value[:2] == (made, stage % self.program.num_stages):
                    self._fire(kind, action.microbatch)

    # ---- what a rank does next -------------------------------------------------------------------------------------

    def _start(self, number: int, rank: _Rank) -> None:
        while rank.totals:
            self._take_part(rank, Kind.SUM_H, rank.totals.popleft())
        action = self._next(number, rank)
        if action is None:
            return
        rank.done.append(action)
        rank.begins.append(self.now)
        rank.ends.append(self.now + DURATIONS[action.kind])
        heapq.heappush(self.events, (rank.ends[-1], -1 - number, action, action.kind, action.microbatch))
        if action[:2] == (0, Kind.F):
            self._look_up()

    def _next(self, number: int, rank: _Rank) -> Action | None:
        home, full = self.homes[number], rank.kept >= KEPT and Kind.T in self.kinds
        if rank.logits and not full:
            rank.kept += 1
            return Action(home, Kind.S, rank.logits.popleft())
        schedule = bool(rank.rest) and self._may(rank.rest[0])
        if rank.weights and (not schedule or (full and rank.logits)):
            rank.kept -= 1
            return Action(home, Kind.T, rank.weights.popleft())
        if rank.scatters and (not schedule or len(rank.scatters) >= KEPT):
            return Action(home, Kind.G, rank.scatters.popleft())
        return rank.rest.popleft() if schedule else None

    def _may(self, action: Action) -> bool:
        """Whether all that a computation of the schedule needs is there."""
        stage = -1 if action.stage == self.last else action.stage
        for place in {stage, action.stage}:
            given = GIVES.get((place, action.kind))
            if given in self.kinds and (given, action.microbatch) not in self.complete:
                return False
        return all(self.ready[value] >= 0 for value in needs(action, self.program.num_stages))

    # ---- the result ------------------------------------------------------------------------------------------------

    def row(self, number: int) -> tuple[list[int], list[int], list[int]]:
        """A rank's packed actions, and when each begins and ends; what can never happen comes last."""
        rank, home = self.ranks[number], self.homes[number]
        never = self.now + 1
        begins = rank.begins + [never + 2 * turn for turn in range(len(rank.rest))]
        ends = rank.ends + [never + 2 * turn + 1 for turn in range(len(rank.rest))]
        computations = [*rank.done, *rank.rest]
        held, place = self.program.semantics.blocking, 0
        row: list[tuple[int, int, int]] = []
        taken = 0
        for kind, microbatch, time in self.fired:
            posted = rank.places.get((kind, microbatch), bisect_right(rank.ends, time))
            place = max(place, bisect_left(rank.begins, time) if held else posted)
            row += zip((a.code for a in computations[taken:place]), begins[taken:place], ends[taken:place], strict=True)
            taken = place
            at = time if held else min([time, *begins[place : place + 1]])
            row.append((Action(home, kind, microbatch).code, at, at))
        row += zip((a.code for a in computations[taken:]), begins[taken:], ends[taken:], strict=True)
        codes, starts, stops = zip(*row, strict=True)
        return list(codes), list(starts), list(stops)
