"""What a stage may hold, and what its blocks take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite
from numbers import Real

import numpy as np

from pipert.errors import PartitionError
from pipert.graph.model_graph import ModelGraph
from pipert.partition.chain import Array, Reach
from pipert.partition.kernels import Backend, memory_reach

_MOST = {"memory": 2**62, "in_flight": 2**28, "blocks": 2**62}
"""Limits beyond these are the same as these: sums and products of them fit into 64 bits."""


@dataclass(frozen=True)
class StageLimit:
    """What one stage may hold.

    Attributes:
        memory: bytes, None for no limit.
        in_flight: micro-batches whose activations live at once, as the schedule has it (1F1B on p stages: p - stage).
        blocks: at most this many blocks, None for no limit.
        recompute: what is computed again in the backward instead of kept: ``none``, ``selective``, ``block``, ``full``.

    Raises:
        PartitionError: a number that is no limit.
    """

    memory: int | None = None
    in_flight: int = 1
    blocks: int | None = None
    recompute: str = "none"

    def __post_init__(self) -> None:
        for name, least in (("memory", 0), ("in_flight", 0), ("blocks", 1)):
            value: float | None = getattr(self, name)
            if value is None and name != "in_flight":
                continue
            if value is None or not isinstance(value, Real) or not isfinite(value) or int(value) != value:
                remedy = "give a whole number" + (", or None for no limit" if name != "in_flight" else "")
                raise PartitionError(f"{name} = {value!r} is no limit of a stage; {remedy}")
            if value < least:
                raise PartitionError(f"{name} = {value!r} is no limit of a stage; it must be >= {least}")
            object.__setattr__(self, name, min(int(value), _MOST[name]))  # 80e9 and NumPy's integers are fine too


def per_stage(limits: StageLimit | Sequence[StageLimit] | None, stages: int) -> tuple[StageLimit, ...]:
    """One limit per stage.

    Raises:
        PartitionError: not as many limits as stages, or something that is no limit.
    """
    if limits is None or isinstance(limits, StageLimit):
        return (limits or StageLimit(),) * stages
    if not isinstance(limits, Sequence) or not all(isinstance(limit, StageLimit) for limit in limits):
        raise PartitionError(f"limits = {limits!r:.80}: give a StageLimit(memory=..., in_flight=...), or one per stage")
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

    Raises:
        PartitionError: ``state`` is not a number >= 0.
    """

    graph: ModelGraph
    state: float = 4.0

    def __post_init__(self) -> None:
        if not isinstance(self.state, Real) or not 0 <= self.state < inf:
            raise PartitionError(f"state = {self.state!r} must be >= 0: the bytes kept per byte of parameters")

    @cached_property
    def groups(self) -> dict[str, list[int]]:
        """Tied groups (by position) that each block uses."""
        uses: dict[str, list[int]] = {}
        for g, group in enumerate(self.graph.tied):
            for name in group.blocks:
                uses.setdefault(name, []).append(g)
        return uses

    @cached_property
    def own(self) -> Array:
        """Bytes of each block's state that no other block shares."""
        tied = np.zeros(len(self.graph.blocks), dtype=np.int64)
        for name, groups in self.groups.items():
            tied[self.graph.index[name]] = sum(self.graph.tied[g].nbytes for g in groups)
        whole = np.array([block.parameter_bytes for block in self.graph.blocks], dtype=np.int64)
        buffers = np.array([block.buffer_bytes for block in self.graph.blocks], dtype=np.int64)
        own: Array = np.rint(self.state * (whole - tied)).astype(np.int64) + buffers
        return own

    @cached_property
    def shared(self) -> list[int]:
        """Bytes of state of each tied group."""
        return [round(self.state * group.nbytes) for group in self.graph.tied]

    @cached_property
    def kept(self) -> Array:
        """Bytes that each block keeps for the backward of one micro-batch."""
        return np.array([block.activation_bytes or 0 for block in self.graph.blocks], dtype=np.int64)

    @cached_property
    def inputs(self) -> Array:
        """Bytes that each block is given for one micro-batch, as far as they are known."""
        given = np.zeros(len(self.graph.blocks), dtype=np.int64)
        for edge in self.graph.edges:
            if edge.target in self.graph.index:
                given[self.graph.index[edge.target]] += edge.nbytes or 0
        return given

    def activations(self, places: Sequence[int], limit: StageLimit) -> int:
        """Bytes of activations at the peak, in a stage of the blocks at these places.

        Recomputing a block or a stage needs all of its activations for a moment. What ``selective`` saves is unknown
        here, so it counts as ``none``.
        """
        kept = int(self.kept[list(places)].sum())
        if limit.recompute == "block":
            return limit.in_flight * int(self.inputs[list(places)].sum()) + int(self.kept[list(places)].max())
        if limit.recompute == "full":
            return limit.in_flight * int(self.inputs[places[0]]) + kept
        return limit.in_flight * kept

    def _bounds(self, limit: StageLimit) -> tuple[Array, int]:
        """Bytes for each block, and bytes on top, that are together never less than `activations`."""
        if limit.recompute == "block":
            return limit.in_flight * self.inputs, int(self.kept.max(initial=0))
        if limit.recompute == "full":
            return self.kept, limit.in_flight * int(self.inputs.max(initial=0))
        return limit.in_flight * self.kept, 0

    def reach(self, order: Sequence[str], limits: Sequence[StageLimit]) -> Reach:
        """How far stages get under these limits when blocks stand in this order."""
        kinds = list(dict.fromkeys(limits))
        places = [self.graph.index[name] for name in order]
        n = len(places)
        rows = np.full((len(kinds), n), n, dtype=np.int64)
        back = Backend(8 * n * len(kinds))
        used = [self.groups.get(name, []) for name in order]
        first = back.ints(np.cumsum([0, *map(len, used)]))
        group = back.ints([g for groups in used for g in groups] or [0])
        own, size = back.ints(self.own[places]), back.ints(self.shared or [0])
        count, reach = back.blank(len(size)), back.blank(n)
        for r, kind in enumerate(kinds):
            if kind.memory is not None:
                kept, on_top = self._bounds(kind)
                room = max(kind.memory - on_top, 0)
                back.run(memory_reach, own, back.ints(kept[places]), first, group, size, 1, room, count, reach)
                rows[r] = np.asarray(reach)
            if kind.blocks is not None:
                rows[r] = np.minimum(rows[r], np.arange(n) + kind.blocks)
        row = {kind: r for r, kind in enumerate(kinds)}
        return Reach(rows, tuple(row[limit] for limit in limits))
