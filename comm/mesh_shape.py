"""Which rank is where: the numbers of a mesh, without any transport."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pipert.comm.errors import MeshError

Axis = Literal["pp", "dp", "tp"]
#: In the order in which their groups are made.
AXES: tuple[Axis, ...] = ("pp", "dp", "tp")
#: Frontier's order: the 8 devices of a node are neighbours in tp, then in dp; pipeline stages lie on other nodes.
DEFAULT_ORDER = "tp,dp,pp"


class Coordinates(NamedTuple):
    """Where a rank is: its place along each axis."""

    pp: int
    dp: int
    tp: int


@dataclass(frozen=True)
class MeshShape:
    """How many ranks along each axis, and how ranks are numbered.

    With ``order="tp,dp,pp"`` the tp coordinate changes fastest from rank to rank, then dp, then pp. For 2 x 2 x 2:

        rank   0 1 2 3 4 5 6 7
        tp     0 1 0 1 0 1 0 1
        dp     0 0 1 1 0 0 1 1
        pp     0 0 0 0 1 1 1 1

    Raises:
        MeshError: a size that is not an int of at least 1, or an order that does not name each axis once.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    order: str = DEFAULT_ORDER

    def __post_init__(self) -> None:
        for axis in AXES:
            object.__setattr__(self, axis, _checked_size(axis, getattr(self, axis)))
        if not isinstance(self.order, str) or sorted(self.order.replace(" ", "").split(",")) != sorted(AXES):
            rule = f"must name pp, dp and tp once each, fastest first, as {DEFAULT_ORDER!r} does"
            raise MeshError(f"order = {self.order!r} {rule}")
        object.__setattr__(self, "order", self.order.replace(" ", ""))

    def __str__(self) -> str:
        return f"pp={self.pp} dp={self.dp} tp={self.tp} order={self.order}"

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.pp * self.dp * self.tp

    def along(self, axis: Axis) -> int:
        """The number of ranks along an axis."""
        return int(getattr(self, axis))

    def check_ranks(self, ranks: int) -> None:
        """Check that the mesh takes exactly the ranks there are.

        Raises:
            MeshError: it takes more or fewer.
        """
        if self.size != ranks:
            raise MeshError(
                f"pp*tp*dp = {self.size} but {ranks} rank{'s' * (ranks != 1)}; "
                f"start {self.size} ranks, or choose pp, tp and dp (now {self.pp}, {self.tp} and {self.dp}) "
                f"whose product is {ranks}"
            )

    def rank_of(self, *, pp: int = 0, dp: int = 0, tp: int = 0) -> int:
        """The rank at these coordinates.

        Raises:
            MeshError: a coordinate outside the mesh.
        """
        place = Coordinates(pp, dp, tp)
        rank = 0
        for axis in reversed(self._axes()):
            coordinate, along = getattr(place, axis), self.along(axis)
            if not 0 <= coordinate < along:
                raise MeshError(f"{axis} = {coordinate} lies outside the mesh {self}; use 0 to {along - 1}")
            rank = rank * along + coordinate
        return rank

    def coordinates(self, rank: int) -> Coordinates:
        """Where a rank is.

        Raises:
            MeshError: no rank of the mesh.
        """
        if not 0 <= rank < self.size:
            raise MeshError(f"rank {rank} lies outside the mesh {self}; use 0 to {self.size - 1}")
        place = {}
        for axis in self._axes():
            rank, place[axis] = divmod(rank, self.along(axis))
        return Coordinates(**place)

    def group(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` along this axis alone, itself included, by their coordinate."""
        place = self.coordinates(rank)._asdict()
        return tuple(self.rank_of(**place | {axis: coordinate}) for coordinate in range(self.along(axis)))

    def _axes(self) -> list[Axis]:
        return sorted(AXES, key=self.order.split(",").index)


def _checked_size(axis: str, size: object) -> int:
    try:
        if isinstance(size, bool):
            raise TypeError
        number = operator.index(size)  # type: ignore[arg-type]
    except TypeError:
        raise MeshError(f"{axis} = {size!r} is not a whole number of ranks; use an int of at least 1") from None
    if number < 1:
        raise MeshError(f"{axis} = {number} is not a number of ranks; use at least 1 (1 = no {axis})")
    return number
