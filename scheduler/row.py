"""A rank's actions in order, packed so that millions of them are cheap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar, overload

import numpy as np
import numpy.typing as npt

from pipert.scheduler.action import KIND_MASK, KIND_SHIFT, MICROBATCH_MASK, NUMBERLESS, STAGE_SHIFT, Action, Kind
from pipert.scheduler.errors import ActionError

Codes = npt.NDArray[np.int64]
Integer = TypeVar("Integer", np.int32, np.int64)


def pack(stages: npt.ArrayLike, kind: int | Codes, microbatches: npt.ArrayLike = 0) -> Codes:
    """Pack many actions into codes; stages, kinds and micro-batches are arrays or single numbers."""
    stages, kind, microbatches = np.asarray(stages, np.int64), np.asarray(kind, np.int64), np.asarray(microbatches)
    codes: Codes = stages << STAGE_SHIFT | kind << KIND_SHIFT | microbatches
    return codes


def distinct(numbers: npt.NDArray[Integer]) -> npt.NDArray[Integer]:
    """The different ones of some numbers, ascending.

    `np.unique` is slower, and its first call imports `numpy.ma`, which takes half as long as numpy itself.
    """
    ascending = np.sort(numbers)
    new = np.ones(len(ascending), dtype=np.bool_)
    np.not_equal(ascending[1:], ascending[:-1], out=new[1:])
    found: npt.NDArray[Integer] = ascending[new]
    return found


class ActionRow(Sequence[Action]):
    """An immutable sequence of actions over one array of packed codes (8 bytes an action).

    It iterates as a tuple of actions would; rows compare and hash by their actions. Loops over many actions read
    `codes`, `stages`, `kinds` and `microbatches` instead of creating objects.

    Raises:
        ActionError: something is no action, or its numbers are out of range.
    """

    __slots__ = ("_codes",)

    def __init__(self, actions: Iterable[Action] = ()) -> None:
        self._codes: Codes = np.fromiter(map(_code, actions), dtype=np.int64)
        self._codes.flags.writeable = False

    @classmethod
    def from_codes(cls, codes: npt.ArrayLike) -> ActionRow:
        """Wrap packed codes (copied unless already a read-only int64 array)."""
        row = cls.__new__(cls)
        array = np.asarray(codes, dtype=np.int64)
        row._codes = array if not array.flags.writeable else array.copy()
        row._codes.flags.writeable = False
        return row

    @classmethod
    def parse(cls, text: str) -> ActionRow:
        """Read actions separated by white space."""
        return cls(map(Action.parse, text.split()))

    @property
    def codes(self) -> Codes:
        """The packed codes, int64, read-only."""
        return self._codes

    @property
    def stages(self) -> Codes:
        """The stage of every action."""
        return self._codes >> STAGE_SHIFT

    @property
    def kinds(self) -> Codes:
        """The kind of every action, as numbers of `Kind`."""
        return self._codes >> KIND_SHIFT & KIND_MASK

    @property
    def microbatches(self) -> Codes:
        """The micro-batch of every action."""
        return self._codes & MICROBATCH_MASK

    def __len__(self) -> int:
        return len(self._codes)

    @overload
    def __getitem__(self, index: int) -> Action: ...
    @overload
    def __getitem__(self, index: slice) -> ActionRow: ...
    def __getitem__(self, index: int | slice) -> Action | ActionRow:
        if isinstance(index, slice):
            return ActionRow.from_codes(self._codes[index])
        return Action.from_code(int(self._codes[index]))

    def __iter__(self) -> Iterator[Action]:
        return map(Action.from_code, self._codes.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ActionRow):
            return bool(np.array_equal(self._codes, other._codes))
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self._codes.tobytes())

    def computations(self) -> ActionRow:
        """The computations of stages alone."""
        return ActionRow.from_codes(self._codes[np.isin(self.kinds, [kind for kind in Kind if kind.is_scheduled])])

    def words(self) -> list[str]:
        """The text form of every action."""
        names = [kind.name for kind in Kind]
        fields = zip(self.stages.tolist(), self.kinds.tolist(), self.microbatches.tolist(), strict=True)
        return [f"{stage}{names[kind]}{'' if kind in NUMBERLESS else number}" for stage, kind, number in fields]

    def __str__(self) -> str:
        return " ".join(self.words())

    def __repr__(self) -> str:
        return f"ActionRow.parse({str(self)!r})"


def _code(action: Action) -> int:
    if not isinstance(action, Action):
        raise ActionError(
            f"{action!r:.60} is not an Action; write Action(stage, kind, micro-batch), or ActionRow.parse('0F0 0B0')"
        )
    return action.code
