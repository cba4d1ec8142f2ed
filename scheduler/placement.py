"""Placement: which rank owns which stage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral

from pipert.scheduler.action import MICROBATCH_MASK
from pipert.scheduler.errors import LayoutError


@dataclass(frozen=True)
class Placement:
    """The rank of every stage, ``owners[stage]``. Ranks count from 0 without gaps.

    Three shapes for 4 ranks, stages from left to right::

        linear      0 1 2 3
        looped x 2  0 1 2 3 0 1 2 3        (interleaved schedules)
        v           0 1 2 3 3 2 1 0        (V-shaped schedules: 3 -> 4 stays on rank 3)
    """

    owners: tuple[int, ...]

    def __post_init__(self) -> None:
        owners = tuple(self.owners)
        strange = [owner for owner in owners if not is_whole(owner)]
        if strange:
            raise LayoutError(
                f"placement {_short(owners)} has {strange[0]!r}; give the rank of every stage, an integer"
            )
        # Compared before the ranks are counted out: one that is far too large must not cost its size in memory.
        if not owners or len(set(owners)) != max(owners) + 1 or min(owners) < 0:
            raise LayoutError(f"placement {_short(owners)} must use every rank from 0 on; give each one a stage")
        object.__setattr__(self, "owners", tuple(map(int, owners)))

    @classmethod
    def linear(cls, ranks: int) -> Placement:
        """Stage s on rank s."""
        return cls(tuple(range(positive("ranks", ranks))))

    @classmethod
    def looped(cls, ranks: int, chunks: int) -> Placement:
        """Stage s on rank s modulo `ranks`, `chunks` stages a rank."""
        return cls(tuple(range(positive("ranks", ranks))) * positive("chunks", chunks))

    @classmethod
    def v(cls, ranks: int) -> Placement:
        """Two stages a rank, down and up again: rank r owns stages r and 2·ranks − 1 − r."""
        down = tuple(range(positive("ranks", ranks)))
        return cls(down + down[::-1])

    @classmethod
    def of(cls, owners: Iterable[int]) -> Placement:
        """Any other placement."""
        return cls(tuple(owners))

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.owners)

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return max(self.owners) + 1

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of `rank`, in model order."""
        return tuple(stage for stage, owner in enumerate(self.owners) if owner == rank)

    def is_local(self, stage: int) -> bool:
        """Whether the hand-over from `stage` to the next one stays on its rank."""
        return self.owners[stage] == self.owners[stage + 1]

    def __str__(self) -> str:
        return " ".join(map(str, self.owners))


def is_whole(value: object) -> bool:
    """Whether `value` is an integer of Python or NumPy (a truth value is none)."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def positive(name: str, value: int) -> int:
    """Return `value` as a Python integer, or refuse it.

    Raises:
        LayoutError: it is not an integer ≥ 1, or more than actions can count.
    """
    if not is_whole(value) or value < 1:
        raise LayoutError(f"{name} = {value!r} must be an integer >= 1")
    if value > MICROBATCH_MASK:
        raise LayoutError(f"{name} = {value} is more than actions can count; use at most {MICROBATCH_MASK}")
    return int(value)


def _short(owners: tuple[object, ...]) -> str:
    return str(owners) if len(owners) <= 16 else f"({', '.join(map(str, owners[:16]))}, … {len(owners)} stages)"
