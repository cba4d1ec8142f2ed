"""Schedule: who computes what in which order. Nothing about communication."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipert.scheduler.action import Action
from pipert.scheduler.errors import LayoutError
from pipert.scheduler.placement import Placement, is_whole
from pipert.scheduler.row import ActionRow


@dataclass(frozen=True)
class Schedule:
    """For every rank its compute actions in order, beside the placement of the stages.

    A schedule is a plain value: it may be wrong (that is the verifier's business), it compares, hashes and
    round-trips through text (`pipert.scheduler.formats.text`).

    Attributes:
        name: what people call it, for example ``1f1b``.
        placement: the rank of every stage.
        microbatches: the number of micro-batches of a step, ≥ 1.
        rows: one `ActionRow` a rank.

    Raises:
        LayoutError: a field is of another type.
    """

    name: str
    placement: Placement
    microbatches: int
    rows: tuple[ActionRow, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.placement, Placement):
            raise LayoutError(f"placement = {self.placement!r:.60} is not a Placement; write Placement.of(...)")
        if not is_whole(self.microbatches):
            raise LayoutError(f"microbatches = {self.microbatches!r} must be an integer")
        strange = [row for row in self.rows if not isinstance(row, ActionRow)]
        if strange:
            raise LayoutError(
                f"the row {strange[0]!r:.60} is not an ActionRow; Schedule.of takes any iterables of actions"
            )
        object.__setattr__(self, "microbatches", int(self.microbatches))
        object.__setattr__(self, "rows", tuple(self.rows))

    @classmethod
    def of(cls, name: str, placement: Placement, microbatches: int, rows: Iterable[Iterable[Action]]) -> Schedule:
        """Build from any iterables of actions."""
        packed = tuple(row if isinstance(row, ActionRow) else ActionRow(row) for row in rows)
        return cls(name, placement, microbatches, packed)

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self.rows)

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return self.placement.num_stages

    @property
    def num_actions(self) -> int:
        """The number of compute actions over all ranks."""
        return sum(map(len, self.rows))
