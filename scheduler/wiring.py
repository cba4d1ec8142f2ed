"""Wiring: who waits for whom in a program, as the flat arrays on which `worklist.play_program` runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipert.scheduler.action import COUNTERPART, KIND_MASK, KIND_SHIFT, STAGE_SHIFT, VOCABULARY_COLLECTIVES, Kind
from pipert.scheduler.dependencies import AWAITS, BRINGS, GIVES, NEEDS, SUMS, TELLS, USES_WEIGHTS
from pipert.scheduler.index import Index
from pipert.scheduler.program import Program
from pipert.scheduler.row import distinct
from pipert.scheduler.semantics import Semantics
from pipert.scheduler.worklist import Ints, Positions

_OFFSETS = np.zeros(len(Kind), dtype=np.int64)
_OFFSETS[list(COUNTERPART)] = [offset for _, offset in COUNTERPART.values()]
_ACROSS = np.zeros(len(Kind), dtype=np.int64)  # what to add to a code to get the other end's
for _kind, (_end, _offset) in COUNTERPART.items():
    _ACROSS[_kind] = (_end - _kind << KIND_SHIFT) + (_offset << STAGE_SHIFT)
_IS_SEND = np.array([kind.is_send for kind in Kind])
_IS_MESSAGE = np.array([kind.is_message for kind in Kind])
_IS_SPREAD = np.array([kind in VOCABULARY_COLLECTIVES for kind in Kind])


@dataclass(frozen=True, eq=False)
class Messages:
    """The messages of one rank's row, in order.

    Attributes:
        positions: where they stand.
        peers: the rank at the other end of each.
        sends: whether each is the sending end.
    """

    positions: Positions
    peers: Positions
    sends: npt.NDArray[np.bool_]

    def queues(self, semantics: Semantics) -> Iterator[Positions]:
        """The positions of messages that share a channel, for each channel on which more than one can wait."""
        if semantics.channel == "message":
            return
        keys = np.zeros_like(self.peers) if semantics.channel == "rank" else self.peers
        if semantics.channel == "direction":
            keys = 2 * keys + self.sends
        for key in distinct(keys).tolist():
            yield self.positions[keys == key]

    def to(self, peer: int) -> Positions:
        """The positions of the sends to `peer`."""
        found: Positions = self.positions[(self.peers == peer) & self.sends]
        return found

    def source(self, peer: int) -> Positions:
        """The positions of the receives from `peer`."""
        found: Positions = self.positions[(self.peers == peer) & ~self.sends]
        return found


def messages(index: Index, rank: int) -> Messages:
    """The messages of a rank whose actions are all usable."""
    start, stop = index.offsets[rank], index.offsets[rank + 1]
    kinds = (index.codes[start:stop] >> KIND_SHIFT & KIND_MASK).astype(np.uint8)
    here = np.flatnonzero(_IS_MESSAGE[kinds])
    kinds = kinds[here]
    positions = (here + start).astype(np.int32)
    peers = index.owners[(index.codes[positions] >> STAGE_SHIFT) + _OFFSETS[kinds]].astype(np.int32)
    return Messages(positions, peers, _IS_SEND[kinds])


def collectives(index: Index, rank: int) -> Positions:
    """The positions of a rank's collectives of all ranks, which share a queue of their own, in order."""
    start, stop = index.offsets[rank], index.offsets[rank + 1]
    here = np.flatnonzero(_IS_SPREAD[index.codes[start:stop] >> KIND_SHIFT & KIND_MASK])
    positions: Positions = (here + start).astype(np.int32)
    return positions


def queues(index: Index, rank: int, semantics: Semantics) -> Iterator[Positions]:
    """The positions of a rank's operations that share a queue, for each queue."""
    yield from messages(index, rank).queues(semantics)
    if len(together := collectives(index, rank)):
        yield together
    start, stop = index.offsets[rank], index.offsets[rank + 1]
    for kind in filter(index.has, (Kind.OFFLOAD, Kind.RELOAD)):  # one after the other in each direction
        table = index.table(kind)
        here: Positions = np.sort(table[(table >= start) & (table < stop)])
        if len(here):
            yield here


def counterparts(codes: Ints) -> Ints:
    """The packed other ends of packed messages."""
    ends: Ints = codes + _ACROSS[codes >> KIND_SHIFT & KIND_MASK]
    return ends


@dataclass(frozen=True, eq=False)
class Wiring:
    """The arrays of the same names that `worklist.play_program` takes, int32 ``[actions]``."""

    index: Index
    semantics: Semantics
    needs: Positions
    also: Positions
    ring: Positions
    unit: Positions
    behind: Positions
    pending: Positions


def wire(index: Index, program: Program) -> Wiring:
    """Wire a program in which every message has its other end (see `pipert.scheduler.verify`)."""
    actions = len(index.codes)
    none = np.full(actions, -1, dtype=np.int32)
    needs, ring, behind = none, none.copy(), none.copy()
    unit = _units(index, program)
    pending = np.ones(actions, dtype=np.int32)
    rows = [messages(index, rank) for rank in range(program.num_ranks)]
    _feed(index, needs)
    _pair(index, program.semantics, rows, ring)
    _join_collectives(index, needs, ring)
    if program.vocabulary is not None:
        _spread(index, needs, ring)
    also = np.concatenate([_hold_for_weights(index, needs, ring), _hold_for_reloads(index, needs, ring)])
    _hold_steps(index, program, needs)
    for rank in range(program.num_ranks):
        for queue in queues(index, rank, program.semantics):
            _line_up(queue, unit, behind, pending)
    return Wiring(index, program.semantics, needs, also, ring, unit, behind, pending)


def _units(index: Index, program: Program) -> Positions:
    """The first operation of everyone's group; empty without groups."""
    if not program.groups:
        return np.zeros(0, dtype=np.int32)
    unit = np.arange(len(index.codes), dtype=np.int32)
    for rank, offset in enumerate(index.offsets[:-1].tolist()):
        spans = np.array(program.spans(rank), dtype=np.int64).reshape(-1, 2) + offset
        sizes = spans[:, 1] - spans[:, 0]
        firsts = np.repeat(spans[:, 0], sizes)
        within = np.arange(len(firsts)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        unit[firsts + within] = firsts
    return unit


def _feed(index: Index, needs: Positions) -> None:
    """Let computations wait for the receives that feed them, and receives for their sizes."""
    for kind, entries in NEEDS.items():
        for value, offset in entries:
            if offset != 0 and index.has(kind) and index.has(BRINGS[value, offset]):
                _wait(index.table(kind), index.table(BRINGS[value, offset]), needs)
    for meta, message in TELLS.items():
        if not meta.is_send and index.has(meta):
            _wait(index.table(message), index.table(meta), needs)


def _wait(waiting: Positions, awaited: Positions, needs: Positions) -> None:
    both = (waiting >= 0) & (awaited >= 0)
    needs[waiting[both]] = awaited[both]


def _pair(index: Index, semantics: Semantics, rows: list[Messages], ring: Positions) -> None:
    """Join the two ends of every message, as the transport matches them."""
    if semantics.matching == "order":
        for rank, row in enumerate(rows):
            for peer in distinct(row.peers[row.sends]).tolist():
                sends, receives = row.to(peer), rows[peer].source(rank)
                ring[sends], ring[receives] = receives, sends
        return
    for send, (receive, offset) in COUNTERPART.items():
        if send.is_send and index.has(send):
            near, far = index.table(send), np.roll(index.table(receive), -offset, axis=0)
            there = near >= 0
            ring[near[there]], ring[far[there]] = far[there], near[there]


def _join_collectives(index: Index, needs: Positions, ring: Positions) -> None:
    """Join the ranks of every tie and of the norm, and let the sums of one stage follow one another."""
    for stage in _by_stage(index, SUMS):
        ring[stage] = stage
        needs[stage[1:]] = stage[:-1]
    for kind in (Kind.TIE, Kind.NORM):
        for column in index.table(kind).T if index.has(kind) else ():
            last_of_rank = {index.locate(position)[0]: position for position in np.sort(column[column >= 0]).tolist()}
            members = list(last_of_rank.values())
            ring[members] = members[1:] + members[:1]


def _by_stage(index: Index, kinds: Sequence[Kind]) -> list[Positions]:
    """For each stage the positions of its actions of some kinds, in order."""
    tables = [index.table(kind) for kind in kinds if index.has(kind)]
    nothing = np.zeros(0, dtype=np.int32)
    if not tables:
        return [nothing] * index.num_stages
    return [np.sort(row[row >= 0]) for row in np.concatenate(tables, axis=1)]


def _hold_for_weights(index: Index, needs: Positions, ring: Positions) -> Positions:
    """Let whatever uses weights wait for the GATHER before it; returns `also`."""
    if not index.has(Kind.GATHER):
        return np.zeros(0, dtype=np.int32)
    also = np.full_like(needs, -1)
    gathers = _by_stage(index, [Kind.GATHER])
    for kind in USES_WEIGHTS:
        slots = needs if kind is Kind.FREE else also  # computations wait for a message too
        for fetched, using in zip(gathers, _by_stage(index, [kind]), strict=True):
            before = np.searchsorted(fetched, using) - 1
            slots[using[before >= 0]] = fetched[before[before >= 0]]
    for fetched in gathers:
        ring[fetched] = fetched
    return also


def _hold_for_reloads(index: Index, needs: Positions, ring: Positions) -> Positions:
    """Let a RELOAD wait for its OFFLOAD, and a backward for its RELOAD; returns one more row of `also`."""
    if not index.has(Kind.RELOAD):
        return np.zeros(0, dtype=np.int32)
    also, back, out = np.full_like(needs, -1), index.table(Kind.RELOAD), index.table(Kind.OFFLOAD)
    for kind in filter(index.has, (Kind.B, Kind.I)):
        _wait(index.table(kind), back, also)
    _wait(back, out, needs)
    for table in (back, out):
        alone = table[table >= 0]
        ring[alone] = alone
    return also


def _hold_steps(index: Index, program: Program, needs: Positions) -> None:
    """Let every STEP wait for the last sum that it uses, of its stage or its tied weights, or for the norm."""
    if not index.has(Kind.STEP):
        return
    sums, norms = _by_stage(index, SUMS), _by_stage(index, [Kind.NORM])
    for stage, steps in enumerate(_by_stage(index, [Kind.STEP])):
        rank = index.owners[stage]
        here = np.flatnonzero(index.owners == rank)
        own = [tie for tie, copies in enumerate(program.ties) if stage in copies and index.has(Kind.TIE)]
        ties = [index.table(Kind.TIE)[here, tie] for tie in own]
        awaited = np.concatenate([sums[stage], *ties, *(norms[other] for other in here)])
        for step in steps.tolist():
            needs[step] = awaited[awaited < step].max(initial=-1)


def _spread(index: Index, needs: Positions, ring: Positions) -> None:
    """Join the ranks of every collective of the vocabulary, and let its actions wait for them."""
    for kind, awaited in AWAITS.items():
        _wait(index.table(kind), index.table(awaited), needs)
    for (stage, kind), awaited in GIVES.items():
        if index.has(kind) and index.has(awaited):
            home = int(np.argmax(index.owners == index.owners[stage]))
            _wait(index.table(kind)[stage], index.table(awaited)[home], needs)
    for kind in filter(index.has, VOCABULARY_COLLECTIVES):
        table = index.table(kind)
        members = table[(table >= 0).any(axis=1)]
        ring[members] = np.roll(members, -1, axis=0)


def _line_up(queue: Positions, unit: Positions, behind: Positions, pending: Positions) -> None:
    """Queue operations on one channel: each unit behind the one before."""
    units = unit[queue] if len(unit) else queue
    firsts = np.flatnonzero(np.diff(units, prepend=-1))
    sizes = np.diff(firsts, append=len(queue))
    turn = np.repeat(np.arange(len(firsts)), sizes)
    ahead = turn < len(firsts) - 1
    behind[queue[ahead]] = units[firsts[turn[ahead] + 1]]
    pending[units[firsts[1:]]] += sizes[:-1].astype(np.int32)
