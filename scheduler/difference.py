"""Where two schedules or programs differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pipert.scheduler.action import Action, Kind
from pipert.scheduler.program import Program
from pipert.scheduler.row import ActionRow
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.verify.picture import title

#: Actions shown before and behind the first one that differs.
AROUND = 3


@dataclass(frozen=True)
class Difference:
    """Two schedules or programs, side by side; printing it tells where they differ.

    Attributes:
        first: one of them.
        second: the other.
    """

    first: Schedule | Program
    second: Schedule | Program

    @property
    def same(self) -> bool:
        """Whether every rank does the same in the same order, and messages are grouped alike; names do not matter."""
        return not any(self._heads()) and not any(self._rows())

    def __str__(self) -> str:
        lines = [f"a: {title(self.first)}", f"b: {title(self.second)}"]
        return "\n".join([*lines, *(["no difference"] if self.same else [*self._heads(), *self._rows()])])

    def _heads(self) -> Iterator[str]:
        """What differs beside the rows."""
        a, b = self.first, self.second
        if isinstance(a, Program) != isinstance(b, Program):
            yield f"{'a' if isinstance(a, Program) else 'b'} has messages, the other one has not"
        if a.placement != b.placement:
            yield f"stages are on ranks {a.placement} in a, {b.placement} in b"
        if a.microbatches != b.microbatches:
            yield f"{a.microbatches} micro-batches in a, {b.microbatches} in b"
        if isinstance(a, Program) and isinstance(b, Program):
            for name in ("trainable_from", "ties", "vocabulary"):
                mine, theirs = getattr(a, name), getattr(b, name)
                if mine != theirs:
                    yield f"{name} is {mine} in a, {theirs} in b"
            for rank in range(min(a.num_ranks, b.num_ranks)):
                if a.spans(rank) != b.spans(rank):
                    yield f"rank {rank}: messages are grouped in another way"

    def _rows(self) -> Iterator[str]:
        """The ranks whose rows differ, each around the first difference."""
        for rank in range(max(self.first.num_ranks, self.second.num_ranks)):
            rows = [side.rows[rank] if rank < side.num_ranks else None for side in (self.first, self.second)]
            if rows[0] is None or rows[1] is None:
                yield f"rank {rank}: only in {'a' if rows[1] is None else 'b'}"
            elif rows[0] != rows[1]:
                yield from _row(rank, rows[0], rows[1])


def _row(rank: int, mine: ActionRow, theirs: ActionRow) -> Iterator[str]:
    both = min(len(mine), len(theirs))
    differs = mine.codes[:both] != theirs.codes[:both]
    at = int(np.argmax(differs)) if differs.any() else both
    lengths = f"{len(mine)} actions" if len(mine) == len(theirs) else f"{len(mine)} and {len(theirs)} actions"
    yield f"rank {rank}: {lengths}, the first difference at action {at}"
    cells = [[_word(row, place) for place in range(at - AROUND, at + AROUND + 1)] for row in (mine, theirs)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for side, words in zip("ab", cells, strict=True):
        yield f"  {side} " + " ".join(f"{word:<{width}}" for word, width in zip(words, widths, strict=True)).rstrip()
    yield " " * (4 + sum(widths[:AROUND]) + AROUND) + "^" * max(widths[AROUND], 1)
    for side, (own, other) in (("a", (mine, theirs)), ("b", (theirs, mine))):
        only = np.setdiff1d(own.codes, other.codes)
        if len(only):
            kinds = Counter(Action.from_code(code).kind for code in only.tolist())
            counts = ", ".join(f"{kinds[kind]} {kind.name}" for kind in Kind if kind in kinds)
            yield f"  only in {side}: {counts}, from {Action.from_code(int(only[0]))} on"


def _word(row: ActionRow, place: int) -> str:
    return str(row[place]) if 0 <= place < len(row) else ""
