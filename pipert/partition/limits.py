"""What a stage may hold, and what its blocks take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipert.errors import PartitionError
from pipert.graph.model_graph import Block, ModelGraph
from pipert.partition.chain import Reach
from pipert.partition.kernels import Backend, memory_reach


@dataclass(frozen=True)
class StageLimit:
    """What one stage may hold.

    Attributes:
        memory: bytes, None for no limit.
        in_flight: micro-batches whose activations live at once, as the schedule has it (1F1B on p stages: p - stage).
        blocks: at most this many blocks, None for no limit.
    """

    memory: int | None = None
    in_flight: int = 1
    blocks: int | None = None

    def __post_init__(self) -> None:
        if (
            self.in_flight < 0
            or (self.memory is not None and self.memory < 0)
            or (self.blocks is not None and self.blocks < 1)
        ):
            raise PartitionError(f"{self} is no limit; memory and in_flight must be >= 0, blocks >= 1")


def per_stage(limits: StageLimit | Sequence[StageLimit] | None, stages: int) -> tuple[StageLimit, ...]:
    """One limit per stage.

    Raises:
        PartitionError: not as many limits as stages.
    """
    if limits is None or isinstance(limits, StageLimit):
        return (limits or StageLimit(),) * stages
    if len(limits) != stages:
        raise PartitionError(
            f"{len(limits)} stage limits for {stages} stages; give one for each, or a single one for all"
        )
    return tuple(limits)


@dataclass(frozen=True)
class Memory:
    """How bytes of a stage add up: ``state`` for each byte of parameters, buffers, and activations in flight.

    A stage holds a tied parameter once, however many of its blocks use it. Unknown activations count as nothing here;
    `solve` refuses memory limits then.

    Attributes:
        graph: the model.
        state: bytes kept per byte of parameters: 4 for weights, gradients and two moments of the same type.
    """

    graph: ModelGraph
    state: float = 4.0

    @cached_property
    def groups(self) -> dict[str, list[int]]:
        """Tied groups (by position) that each block uses."""
        uses: dict[str, list[int]] = {}
        for g, group in enumerate(self.graph.tied):
            for name in group.blocks:
                uses.setdefault(name, []).append(g)
        return uses

    def own(self, block: Block) -> int:
        """Bytes of a block's state that no other block shares."""
        tied = sum(self.graph.tied[g].nbytes for g in self.groups.get(block.name, ()))
        return round(self.state * (block.parameter_bytes - tied)) + block.buffer_bytes

    @cached_property
    def group_bytes(self) -> list[int]:
        """Bytes of state of each tied group."""
        return [round(self.state * group.nbytes) for group in self.graph.tied]

    def of(self, names: Sequence[str], limit: StageLimit) -> int:
        """Bytes that a stage of these blocks holds at its peak."""
        blocks = [self.graph.blocks[self.graph.index[name]] for name in names]
        shared = {g for name in names for g in self.groups.get(name, ())}
        sizes = self.group_bytes
        kept = limit.in_flight * sum(b.activation_bytes or 0 for b in blocks)
        return sum(map(self.own, blocks)) + sum(sizes[g] for g in shared) + kept

    def reach(self, order: Sequence[str], limits: Sequence[StageLimit]) -> Reach:
        """How far stages get under these limits when blocks stand in this order."""
        kinds = list(dict.fromkeys(limits))
        blocks = [self.graph.blocks[self.graph.index[name]] for name in order]
        n = len(blocks)
        rows = np.full((len(kinds), n), n, dtype=np.int64)
        for r, kind in enumerate(kinds):
            if kind.memory is not None:
                rows[r] = self._row(blocks, kind)
            if kind.blocks is not None:
                rows[r] = np.minimum(rows[r], np.arange(n) + kind.blocks)
        return Reach(rows, tuple(kinds.index(limit) for limit in limits))

    def _row(self, blocks: Sequence[Block], limit: StageLimit) -> list[int]:
        back = Backend(len(blocks))
        own, kept = [self.own(b) for b in blocks], [b.activation_bytes or 0 for b in blocks]
        used = [self.groups.get(b.name, []) for b in blocks]
        first = np.concatenate(([0], np.cumsum([len(groups) for groups in used])))
        sizes = self.group_bytes
        flat = [g for groups in used for g in groups]
        reach, count = back.blank(len(blocks)), back.blank(max(1, len(sizes)))
        lists = [back.ints(values) for values in (own, kept, first, flat or [0], sizes or [0])]
        back.run(memory_reach, *lists, limit.in_flight, limit.memory, count, reach)
        return [reach[i] for i in range(len(blocks))]
