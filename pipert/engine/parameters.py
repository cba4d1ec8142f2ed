"""The parameters of one rank: what they are called in the model, and which of them other ranks hold too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from torch import nn

from pipert.engine.vocabulary_part import VocabularyPart
from pipert.errors import PartitionError
from pipert.graph.model_graph import ModelGraph
from pipert.graph.stage import StageModule
from pipert.scheduler.placement import Placement


@dataclass(frozen=True)
class Tie:
    """A parameter that several stages hold.

    Attributes:
        name: its name in the model, that of its first use.
        stages: those that hold it, in order.
    """

    name: str
    stages: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Owned:
    """A parameter that this rank holds, once for all its stages.

    Attributes:
        name: its name in the model; copies of a tied weight have the same name on every rank.
        order: its place among all parameters of the model.
        stage: this rank's first stage that uses it.
        parameter: the parameter itself.
        counted: whether totals count it here; of a tied weight only the copy of the first stage is.
        tie: number of its `Tie`, if it has one.
    """

    name: str
    order: int
    stage: int
    parameter: nn.Parameter
    counted: bool
    tie: int | None


def find_ties(graph: ModelGraph, assignment: Sequence[Sequence[str]]) -> tuple[Tie, ...]:
    """The parameters that more than one stage holds, in the order of their first use."""
    stage_of = {block: stage for stage, blocks in enumerate(assignment) for block in blocks}
    ties = (Tie(group.identity, tuple(sorted({stage_of[block] for block in group.blocks}))) for group in graph.tied)
    return tuple(tie for tie in ties if len(tie.stages) > 1)


class ParameterBook:
    """All parameters of one rank.

    Args:
        graph: the whole model.
        modules: this rank's stages.
        ties: see `find_ties`.
        part: this rank's rows of a spread vocabulary; `graph` is the rest of the model then.
        whole: all parameters of the model in order, where `graph` is not all of it.

    Raises:
        PartitionError: two stages of this rank hold a tied parameter as two objects.
    """

    def __init__(
        self,
        graph: ModelGraph,
        modules: Mapping[int, StageModule],
        ties: Sequence[Tie],
        part: VocabularyPart | None = None,
        whole: ModelGraph | None = None,
    ) -> None:
        specs = [spec for block in (whole or graph).blocks for spec in block.parameters]
        identities = {spec.name: spec.identity for spec in specs}
        order = {name: i for i, name in enumerate(dict.fromkeys(spec.identity for spec in specs))}
        tie_of = {tie.name: number for number, tie in enumerate(ties)}
        owned: dict[str, Owned] = {}
        for stage, module in sorted(modules.items()):
            for path, parameter in module.named_parameters():
                name = identities[path]
                tie = tie_of.get(name)
                counted = tie is None or ties[tie].stages[0] == stage
                first = owned.setdefault(name, Owned(name, order[name], stage, parameter, counted, tie))
                if first.parameter is not parameter:
                    raise PartitionError(
                        f"{path} in stage {stage} is tied to {name} in stage {first.stage} of the same rank, but is "
                        "another object; keep tied parameters one object when stages are built"
                    )
        if part is not None:
            for path, parameter in part.parameters.items():
                name = identities[path]
                owned[name] = Owned(name, order[name], part.home, parameter, True, None)
        self._names = "\n".join(sorted(owned)).encode()
        self._stages = {stage: tuple(module.parameters()) for stage, module in modules.items()}
        self.owned: tuple[Owned, ...] = tuple(sorted(owned.values(), key=lambda entry: entry.order))
        self._ties = len(ties)

    def __iter__(self) -> Iterator[Owned]:
        return iter(self.owned)

    def pattern(self) -> str:
        """Digest of which parameters are trainable now."""
        flags = bytes(entry.parameter.requires_grad for entry in self.owned)
        return blake2b(self._names + flags, digest_size=8).hexdigest()

    def trainable_stages(self) -> tuple[int, ...]:
        """Which of this rank's stages hold a trainable parameter now."""
        return tuple(stage for stage, held in self._stages.items() if any(p.requires_grad for p in held))

    def tie_flags(self) -> tuple[bool | None, ...]:
        """For each tie whether it is trainable here; None where this rank has no copy."""
        flags: list[bool | None] = [None] * self._ties
        for entry in self.owned:
            if entry.tie is not None:
                flags[entry.tie] = entry.parameter.requires_grad
        return tuple(flags)


def ranks_of(tie: Tie, placement: Placement) -> tuple[int, ...]:
    """The pipeline ranks that hold a copy, first owner first."""
    return tuple(dict.fromkeys(placement.owners[stage] for stage in tie.stages))
