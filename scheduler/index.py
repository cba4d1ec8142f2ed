"""Index: where every action of a schedule or program stands, as tables that whole-program questions read at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pipert.scheduler.action import KIND_MASK, KIND_SHIFT, MICROBATCH_MASK, NUMBERLESS, STAGE_SHIFT, Action, Kind
from pipert.scheduler.dependencies import MAKES, ValueKind
from pipert.scheduler.program import Program
from pipert.scheduler.row import ActionRow, Codes
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.vocabulary import VOCABULARY_KINDS, home_stages

Table = npt.NDArray[np.int32]  # positions, or -1
Mask = npt.NDArray[np.bool_]

#: A stage table larger than this many times the program itself means a number in it is wrong.
MAX_SPARSITY = 64


@dataclass(frozen=True, eq=False)
class Index:
    """All actions one after another (rank 0's row, then rank 1's, …); an action's place in it is its *position*.

    Attributes:
        target: the schedule or program.
        codes: the packed actions, int64 ``[actions]``.
        offsets: where each rank's row starts, int64 ``[ranks + 1]``.
        owners: the rank of every stage, int64 ``[stages]``.
        usable: whether an action is of a known kind, in range and on its stage's rank ``[actions]``. Only these
            are in the tables.
        repeated: positions of actions that the same rank had before.
        sparse: the program is so much smaller than stages × micro-batches that something is missing for certain; then
            there are no tables.
    """

    target: Schedule | Program
    codes: Codes
    offsets: npt.NDArray[np.int64]
    owners: npt.NDArray[np.int64]
    usable: Mask
    repeated: npt.NDArray[np.int64]
    sparse: bool
    _tables: dict[Kind, Table]

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.owners)

    @property
    def microbatches(self) -> int:
        """The number of micro-batches; none if the target has less than none."""
        return max(self.target.microbatches, 0)

    @property
    def trainable_from(self) -> int:
        """The first stage with a backward; within the stages even if the target has it elsewhere."""
        first = self.target.trainable_from if isinstance(self.target, Program) else 0
        return min(max(first, 0), self.num_stages)

    @cached_property
    def reducible(self) -> Mask:
        """For each stage whether there are weight gradients to reduce: its own, or those of its rank's shard."""
        stages: Mask = np.arange(self.num_stages) >= self.trainable_from
        spread = self.target.vocabulary if isinstance(self.target, Program) else None
        if spread is not None and spread.trained:
            stages[list(home_stages(self.target.placement))] = True
        return stages

    def table(self, kind: Kind) -> Table:
        """Positions of all actions of `kind`, ``[stages, microbatches]``, −1 where there is none."""
        return self._tables.get(kind, self._nowhere)

    def has(self, kind: Kind) -> bool:
        """Whether any action is of `kind`."""
        return kind in self._tables

    def made(self, value: ValueKind) -> Table:
        """The position of the action that makes each value of a kind, ``[stages, microbatches]``, −1 if none does."""
        makers = [self.table(kind) for kind, values in MAKES.items() if value in values and self.has(kind)]
        if not makers:
            return self._nowhere
        result = makers[0]
        for other in makers[1:]:
            result = np.where(result >= 0, result, other)
        return result

    @cached_property
    def _nowhere(self) -> Table:
        return np.broadcast_to(np.int32(-1), (self.num_stages, 0 if self.sparse else self.microbatches))

    def locate(self, position: int) -> tuple[int, int]:
        """The rank and the index in its row of a position."""
        rank = int(np.searchsorted(self.offsets, position, side="right")) - 1
        return rank, position - int(self.offsets[rank])

    def action(self, position: int) -> Action:
        """The action at a position."""
        return Action.from_code(int(self.codes[position]))


def index(target: Schedule | Program) -> Index:
    """Index a schedule or program, right or wrong."""
    codes, offsets = flatten(target.rows)
    owners = np.asarray(target.placement.owners, dtype=np.int64)
    widths = _widths(target)
    sparse = is_sparse(len(owners) * int(widths[Kind.F]), len(codes))
    usable = usable_actions(codes, offsets, target)
    tables: dict[Kind, Table] = {}
    repeated: list[npt.NDArray[np.int64]] = []
    for rank, row in enumerate(target.rows):
        span = slice(offsets[rank], offsets[rank + 1])
        if not sparse:
            repeated += _enter(tables, row.codes, usable[span], int(offsets[rank]), len(owners), widths)
    again = np.sort(np.concatenate(repeated)) if repeated else np.zeros(0, dtype=np.int64)
    return Index(target, codes, offsets, owners, usable, again, sparse, tables)


def most_gathers(microbatches: int) -> int:
    """How often a stage's weights can be gathered in a step: once for each of its computations; once in an update."""
    return max(3 * microbatches, 1)


def is_sparse(places: int, actions: int) -> bool:
    """Whether so many of ``stages * microbatches`` places are empty that tables of them would only waste memory."""
    return places > MAX_SPARSITY * (actions + 1024)


def flatten(rows: Sequence[ActionRow]) -> tuple[Codes, npt.NDArray[np.int64]]:
    """All packed actions one row after another, and where each row starts, ``[ranks + 1]``."""
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    codes = np.concatenate([row.codes for row in rows]) if rows else np.zeros(0, dtype=np.int64)
    codes.flags.writeable = False
    return codes, offsets


def usable_actions(codes: Codes, offsets: npt.NDArray[np.int64], target: Schedule | Program) -> Mask:
    """Which actions are of a known kind, in range and on their stage's rank."""
    owners = np.asarray(target.placement.owners, dtype=np.int64)
    stages = codes >> STAGE_SHIFT
    usable: Mask = codes & MICROBATCH_MASK < _widths(target)[codes >> KIND_SHIFT & KIND_MASK]
    usable &= (stages >= 0) & (stages < len(owners))
    if not usable.all():
        stages[~usable] = 0
    ranks = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    usable &= owners[stages] == ranks
    return usable


def _widths(target: Schedule | Program) -> npt.NDArray[np.int64]:
    """For each kind how many numbers its actions may carry; 0 for what is no kind or has no place in the target."""
    program = target if isinstance(target, Program) else None
    widths = np.zeros(KIND_MASK + 1, dtype=np.int64)
    widths[[kind for kind in Kind if kind.is_scheduled or program]] = max(target.microbatches, 0)
    if program and program.vocabulary is None:
        widths[list(VOCABULARY_KINDS)] = 0
    if program:
        widths[list(NUMBERLESS)] = 1
        widths[Kind.TIE] = len(program.ties)
        widths[[Kind.GATHER, Kind.FREE]] = most_gathers(target.microbatches)
    return widths


def _enter(
    tables: dict[Kind, Table], row: Codes, usable: Mask, offset: int, stages: int, widths: npt.NDArray[np.int64]
) -> list[npt.NDArray[np.int64]]:
    """Write one row's positions into the tables and return those of repeated actions."""
    kinds = (row >> KIND_SHIFT & KIND_MASK).astype(np.uint8)
    kinds[~usable] = len(Kind)
    repeated = []
    for kind in map(Kind, np.flatnonzero(np.bincount(kinds, minlength=len(Kind))[: len(Kind)]).tolist()):
        if kind not in tables:
            tables[kind] = np.full((stages, widths[kind]), -1, dtype=np.int32)
        here = np.flatnonzero(kinds == kind)
        places = (row[here] >> STAGE_SHIFT) * widths[kind] + (row[here] & MICROBATCH_MASK)
        table = tables[kind].reshape(-1)
        table[places[::-1]] = (here + offset)[::-1]  # of several the first stays
        late = table[places] != here + offset
        if late.any():
            repeated.append(here[late] + offset)
    return repeated
