"""Why nobody moves: the shortest cycle of waits, in words, when a worklist has stopped early."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pipert.scheduler.action import Action
from pipert.scheduler.dependencies import Value, ValueKind, makers
from pipert.scheduler.index import Index
from pipert.scheduler.play import PlayedProgram, PlayedSchedule
from pipert.scheduler.wiring import Wiring, queues
from pipert.scheduler.worklist import STARTED, WAITING, Positions

#: A wait leads to others: their position, and the words between.
Edges = Callable[[int], Iterator[tuple[int, str]]]

#: Of a longer cycle the sentence leaves out the middle.
LINKS = 8


@dataclass(frozen=True)
class Deadlock:
    """A cycle of waits.

    Attributes:
        positions: the actions that wait for one another, the first for the second and so on around.
        words: the same as a sentence.
    """

    positions: tuple[int, ...]
    words: str


def shortest_cycle(starts: list[int], edges: Edges) -> list[tuple[int, str]]:
    """The shortest cycle that can be reached: its nodes, each with the words of the edge that leaves it."""
    found: dict[int, list[tuple[int, str]]] = {}
    todo = list(dict.fromkeys(starts))
    for node in todo:  # grows
        if node not in found:
            found[node] = list(edges(node))
            todo += [after for after, _ in found[node]]
    best: list[tuple[int, str]] = []
    for start in found:
        cycle = _cycle_through(start, found, len(best) or len(found) + 1)
        if cycle:
            best = cycle
        if 0 < len(best) <= 2:
            break
    return best


def _cycle_through(start: int, edges: dict[int, list[tuple[int, str]]], below: int) -> list[tuple[int, str]]:
    """The shortest cycle through a node with fewer than `below` nodes, or nothing."""
    paths: dict[int, list[tuple[int, str]]] = {start: []}
    queue = deque([start])
    while queue:
        node = queue.popleft()
        for after, words in edges[node]:
            path = [*paths[node], (node, words)]
            if after == start:
                return path if len(path) < below else []
            if after not in paths and len(path) + 1 < below:
                paths[after] = path
                queue.append(after)
    return []


def schedule_deadlock(index: Index, played: PlayedSchedule) -> Deadlock:
    """Explain why `worklist.play_schedule` stopped before the end."""

    def edges(position: int) -> Iterator[tuple[int, str]]:
        rank, _ = index.locate(position)
        value = _value(int(played.missing[rank]), index)
        owner, maker = int(index.owners[value.stage]), _maker(value, index)
        if maker is None:
            yield position, f" for {next(makers(value))}, which nobody runs"
        elif owner == rank:
            yield position, f" for {maker}, which comes later in its own row"
        else:
            after = int(played.cursors[owner])
            yield after, f" for {maker} of rank {owner}, which waits in {index.action(after)}"

    starts = [cursor for rank, cursor in enumerate(played.cursors.tolist()) if cursor < index.offsets[rank + 1]]
    return _deadlock(starts, edges, lambda first: f"rank {index.locate(first)[0]} waits in {index.action(first)}")


def _value(number: int, index: Index) -> Value:
    kind, place = divmod(number, index.num_stages * index.microbatches)
    return Value(ValueKind(kind), *divmod(place, index.microbatches))


def _maker(value: Value, index: Index) -> Action | None:
    there = (one for one in makers(value) if index.table(one.kind)[one.stage, one.microbatch] >= 0)
    return next(there, None)


def program_deadlock(wiring: Wiring, played: PlayedProgram) -> Deadlock:
    """Explain why `worklist.play_program` stopped before the end."""
    index, stuck = wiring.index, _Stuck(wiring, played)

    def opening(first: int) -> str:
        rank, _ = index.locate(first)
        if played.blocked[rank] != first:
            return f"rank {rank} has {stuck.words(first)} under way"
        at_end = played.cursors[rank] == index.offsets[rank + 1] and not wiring.semantics.blocking
        return f"rank {rank} waits {'at the end of its row for' if at_end else 'in'} {stuck.words(first)}"

    return _deadlock([one for one in played.blocked.tolist() if one >= 0], stuck.edges, opening)


def _deadlock(starts: list[int], edges: Edges, opening: Callable[[int], str]) -> Deadlock:
    cycle = shortest_cycle(starts, edges)
    stands = [turn for turn, (node, _) in enumerate(cycle) if node in starts]
    turn = stands[0] if stands else 0
    cycle = cycle[turn:] + cycle[:turn]
    links = [words for _, words in cycle]
    if len(links) > LINKS:
        links[LINKS - 2 : -2] = [f", … {len(links) - LINKS} more …"]
    return Deadlock(tuple(position for position, _ in cycle), opening(cycle[0][0]) + "".join(links))


class _Stuck:
    """The waits among the operations of a program that stopped early.

    A node is an operation that is not complete, and an edge leads to one that must be complete before it can be: the
    one at which the rank of its other end stands, or the first of the queue in which it or its other end waits; the
    same for the others of its group.
    """

    def __init__(self, wiring: Wiring, played: PlayedProgram) -> None:
        self._wiring = wiring
        self._played = played
        self._queues: dict[int, list[Positions]] = {}

    def words(self, position: int, peer: bool = True) -> str:
        """An operation in words, for example ``RECV 3F2 from rank 0``."""
        action, index = self._wiring.index.action(position), self._wiring.index
        if not action.kind.is_message:
            return str(action)
        verb, _, what = action.kind.name.partition("_")
        other = f" {'to' if verb == 'SEND' else 'from'} rank {index.owners[action.counterpart.stage]}" if peer else ""
        return f"{verb} {action.stage}{what}{action.microbatch}{other}"

    def edges(self, position: int) -> Iterator[tuple[int, str]]:
        """What keeps an operation from being complete."""
        rank, _ = self._wiring.index.locate(position)
        if self._played.ends[position] != STARTED:
            yield from self._not_started(position, rank)
            return
        for member in self._unit(position):
            with_it = "" if member == position else f", in one group with {self.words(member)}"
            for other in self._partners(member):
                if self._played.ends[other] == WAITING:
                    for after, words in self._not_started(other, rank):
                        yield after, with_it + words

    def _partners(self, position: int) -> Iterator[int]:
        """The operations that must have started before an operation can be complete."""
        if self._wiring.semantics.buffered and self._wiring.index.action(position).kind.is_send:
            return
        other = int(self._wiring.ring[position])
        while other != position:
            yield other
            other = int(self._wiring.ring[other])

    def _not_started(self, position: int, seen_from: int) -> Iterator[tuple[int, str]]:
        """What keeps an operation from starting."""
        rank, _ = self._wiring.index.locate(position)
        elsewhere = rank != seen_from
        members = self._unit(position)
        if members[-1] >= self._played.cursors[rank]:
            after = int(self._played.blocked[rank])
            message = self._wiring.index.action(position).kind.is_message
            who = "and" if not elsewhere else "which" if message else f"while rank {rank}"
            yield after, f", {who} waits in {self.words(after)}"
            return
        for member in members:
            for head in self._ahead(rank, member):
                if head not in members:
                    here = f", whose {self.words(member, peer=False)} is" if elsewhere or member != position else ","
                    yield head, f"{here} queued behind {self.words(head)}"

    def _unit(self, position: int) -> list[int]:
        unit = self._wiring.unit
        return np.flatnonzero(unit == unit[position]).tolist() if len(unit) else [position]

    def _ahead(self, rank: int, position: int) -> Iterator[int]:
        """The first operation of the queue that an operation is in, of those that are not complete."""
        if rank not in self._queues:
            self._queues[rank] = list(queues(self._wiring.index, rank, self._wiring.semantics))
        for queue in self._queues[rank]:
            place = int(np.searchsorted(queue, position))
            if place < len(queue) and queue[place] == position:
                yield int(queue[np.argmax(self._played.ends[queue] < 0)])
