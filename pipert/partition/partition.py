"""The answer of the partitioner as a value: the blocks of each stage, what they cost, and what crosses the cuts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from pipert.errors import PartitionError
from pipert.graph.model_graph import INPUT, OUTPUT, ModelGraph
from pipert.partition.chain import Array
from pipert.partition.limits import Memory, StageLimit
from pipert.partition.vocabulary import SpreadVocabulary


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        blocks: names, in the order in which they run.
        numel: parameters; one that several of its blocks use counts once.
        forward: expected time of one micro-batch's forward (seconds, or relative where costs are estimated).
        backward: the same for the backward.
        parameter_bytes: bytes of the parameters.
        activation_bytes: bytes that one micro-batch keeps for the backward, None while unknown.
        in_flight: micro-batches whose activations live at once.
        memory: bytes at the peak, None while activations are unknown.
        limit: bytes allowed, None for no limit.
    """

    blocks: tuple[str, ...]
    numel: int
    forward: float
    backward: float
    parameter_bytes: int
    activation_bytes: int | None
    in_flight: int = 1
    memory: int | None = None
    limit: int | None = None

    @property
    def cost(self) -> float:
        """Expected time of one micro-batch, forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Skip:
    """A skip edge over at least one cut: its value passes from stage ``first`` through all between to ``last``."""

    source: str
    target: str
    first: int
    last: int
    nbytes: int | None = None

    def __str__(self) -> str:
        cuts = f"cut {self.first}|{self.last}" if self.last - self.first == 1 else f"stages {self.first}-{self.last}"
        return f"{self.source} -> {self.target} over {cuts}"


@dataclass(frozen=True)
class Partition:
    """A model cut into stages.

    Attributes:
        stages: none is empty; the blocks of all stages in a row are in a topological order.
        skips: the skip edges that cross a cut.
        method: how it was found, in words.
        costs: where times come from, see `ModelGraph.costs`.
        vocabulary: what every rank holds and does a part of; stages' times include their share, their sizes do not.
    """

    stages: tuple[Stage, ...]
    skips: tuple[Skip, ...] = ()
    method: str = ""
    costs: str = "given"
    vocabulary: SpreadVocabulary | None = None

    def plus(self, vocabulary: SpreadVocabulary) -> Partition:
        """The same with a vocabulary that all ranks share."""
        n = len(self.stages)
        stages = (
            replace(
                stage, forward=stage.forward + vocabulary.forward / n, backward=stage.backward + vocabulary.backward / n
            )
            for stage in self.stages
        )
        return replace(self, stages=tuple(stages), vocabulary=vocabulary)

    @property
    def assignment(self) -> tuple[tuple[str, ...], ...]:
        """Block names of each stage, as `pipert.graph.stage_module` takes them."""
        return tuple(stage.blocks for stage in self.stages)

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of blocks of each stage; may be given back as manual cuts for a chain."""
        return tuple(len(stage.blocks) for stage in self.stages)

    @property
    def order(self) -> tuple[str, ...]:
        """All blocks in the order in which they run."""
        return tuple(name for stage in self.stages for name in stage.blocks)

    @cached_property
    def bottleneck(self) -> float:
        """Cost of the heaviest stage."""
        return max(stage.cost for stage in self.stages)

    @cached_property
    def spread(self) -> float:
        """Sum of squared differences between the stages' costs and their mean."""
        mean = sum(stage.cost for stage in self.stages) / len(self.stages)
        return sum((stage.cost - mean) ** 2 for stage in self.stages)

    @property
    def balance(self) -> float:
        """Mean cost of a stage over the heaviest: 1 when all are equal."""
        total = sum(stage.cost for stage in self.stages)
        return total / len(self.stages) / self.bottleneck if self.bottleneck else 1.0

    @cached_property
    def _stage_of(self) -> dict[str, int]:
        return {name: s for s, stage in enumerate(self.stages) for name in stage.blocks}

    def stage_of(self, block: str) -> int:
        """The stage that holds a block.

        Raises:
            PartitionError: no stage does.
        """
        if block not in self._stage_of:
            raise PartitionError(f"no stage holds block {block!r}; blocks are {', '.join(self.order)}")
        return self._stage_of[block]

    def rows(self) -> list[tuple[str, ...]]:
        """The start-up table: a head and a row per stage, as texts."""
        total = sum(stage.cost for stage in self.stages)
        head = ("stage", "first block", "last block", "blocks", "parameters", "time", "memory")
        rows: list[tuple[str, ...]] = [head]
        for s, stage in enumerate(self.stages):
            share = f"{100 * stage.cost / total:.1f} %" if total else "0 %"
            time = share if self.costs == "estimated" else f"{_seconds(stage.cost)} ({share})"
            memory = "?" if stage.memory is None else _bytes(stage.memory)
            if stage.limit is not None:
                memory += f" of {_bytes(stage.limit)}"
            ends = stage.blocks[0], stage.blocks[-1]
            rows.append((str(s), *ends, str(len(stage.blocks)), f"{stage.numel:,}", time, memory))
        return rows

    def table(self) -> str:
        """The start-up table as text, with the skip edges that cross cuts below."""
        rows = self.rows()
        widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
        texts = (True, True, True, False, False, False, False)
        lines = [
            "  ".join(
                cell.ljust(w) if left else cell.rjust(w) for cell, w, left in zip(row, widths, texts, strict=True)
            ).rstrip()
            for row in rows
        ]
        lines.append(f"{self.method}; costs {self.costs}; balance {100 * self.balance:.1f} %")
        lines += [f"skip edge {skip}" for skip in self.skips] + ([str(self.vocabulary)] if self.vocabulary else [])
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    def to_json(self) -> str:
        """The partition as text; `from_json` gives an equal one back."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Partition:
        """Read what `to_json` wrote.

        Raises:
            PartitionError: the text is no partition.
        """
        try:
            data = json.loads(text)
            stages = tuple(Stage(**{**stage, "blocks": tuple(stage["blocks"])}) for stage in data["stages"])
            skips = tuple(Skip(**skip) for skip in data["skips"])
            vocabulary = SpreadVocabulary(**data["vocabulary"]) if data["vocabulary"] else None
            return cls(stages, skips, data["method"], data["costs"], vocabulary)
        except (ValueError, KeyError, TypeError) as error:
            raise PartitionError(f"this text is no partition ({error!r}); write one with Partition.to_json") from error


def describe(
    graph: ModelGraph, assignment: Sequence[Sequence[str]], limits: Sequence[StageLimit], memory: Memory, method: str
) -> Partition:
    """Work out what an assignment of blocks to stages costs.

    Args:
        graph: the model, with costs.
        assignment: names of the blocks of each stage, none empty.
        limits: one per stage.
        memory: how bytes add up.
        method: how the assignment was found.
    """
    places = np.array([graph.index[name] for names in assignment for name in names])
    starts = np.cumsum([0, *(len(names) for names in assignment[:-1])])

    def per_stage(values: Sequence[float] | Array, kind: type) -> list[Any]:
        sums: list[Any] = np.add.reduceat(np.asarray(values, dtype=kind)[places], starts).tolist()
        return sums

    blocks = graph.blocks
    numel, nbytes = per_stage([b.numel for b in blocks], int), per_stage([b.parameter_bytes for b in blocks], int)
    forward, backward = (
        per_stage(t, float) for t in ([b.forward or 0.0 for b in blocks], [b.backward or 0.0 for b in blocks])
    )
    unknown = per_stage([b.activation_bytes is None for b in blocks], int)
    own, kept = per_stage(memory.own, int), per_stage(memory.kept, int)
    stage_of = {name: s for s, names in enumerate(assignment) for name in names} if graph.tied else {}
    for group, shared in zip(graph.tied, memory.shared, strict=True):
        for s, uses in Counter(stage_of[name] for name in group.blocks).items():
            numel[s] -= (uses - 1) * group.numel
            nbytes[s] -= (uses - 1) * group.nbytes
            own[s] += shared
    stages = tuple(
        Stage(
            blocks=tuple(names),
            numel=numel[s],
            forward=forward[s],
            backward=backward[s],
            parameter_bytes=nbytes[s],
            activation_bytes=None if unknown[s] else kept[s],
            in_flight=limit.in_flight,
            memory=None if unknown[s] else own[s] + memory.activations([graph.index[name] for name in names], limit),
            limit=limit.memory,
        )
        for s, (names, limit) in enumerate(zip(assignment, limits, strict=True))
    )
    return Partition(stages, _skips(graph, assignment), method, graph.costs)


def _skips(graph: ModelGraph, assignment: Sequence[Sequence[str]]) -> tuple[Skip, ...]:
    """Edges between blocks that are not neighbours in the order, and run from one stage to another."""
    if graph.is_chain:
        return ()
    place = {name: i for i, name in enumerate(name for names in assignment for name in names)}
    stage = {name: s for s, names in enumerate(assignment) for name in names}
    stage.update({INPUT: 0, OUTPUT: len(assignment) - 1})
    place.update({INPUT: -1, OUTPUT: len(place)})
    return tuple(
        Skip(e.source, e.target, stage[e.source], stage[e.target], e.nbytes)
        for e in graph.edges
        if stage[e.source] != stage[e.target] and place[e.target] - place[e.source] > 1
    )


def _seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def _bytes(value: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f} B"
