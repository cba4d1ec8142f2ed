"""Schedule: who computes what in which order. Nothing about communication."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipert.scheduler.action import Action
from pipert.scheduler.placement import Placement
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
    """

    name: str
    placement: Placement
    microbatches: int
    rows: tuple[ActionRow, ...]

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
