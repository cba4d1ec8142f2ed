"""What one stage runs: some consecutive blocks of a traced model, as a module from the value of one cut to the next."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pipert.errors import GraphError
from pipert.graph.model_graph import ModelGraph

BlockCall = Callable[..., Any]
"""``call(name, module, *values)`` runs one block; the engine puts recompute and random streams around it."""


@dataclass(frozen=True, eq=False)
class StageBlock:
    """A block that can be run.

    Attributes:
        name: its name in the graph.
        module: the user's own module, or a generated one around it; its parameters are the user's, never copies.
        names: for parameters and buffers whose path in the user's model is not ``prefix`` + their path in ``module``.
        prefix: what to put before a path inside ``module`` to get the path in the user's model: ``"blocks.3."``.
    """

    name: str
    module: nn.Module
    prefix: str
    names: Mapping[str, str] = field(default_factory=dict)

    def path(self, local: str) -> str:
        """The path in the user's model of what ``module`` calls ``local``."""
        return self.names.get(local, self.prefix + local)


@dataclass(frozen=True)
class Wire:
    """Names of the values that a block reads (in the order of its arguments) and of those that it returns."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True)
class Slot:
    """Stands for a value in the template of the model's output."""

    value: str


@dataclass(frozen=True, eq=False)
class Wiring:
    """How values run between the blocks of a model that is not a chain.

    Attributes:
        wires: one per block.
        inputs: names of the values that the model is called with.
        arguments: the argument of the model's ``forward`` for each of ``inputs``.
        signature: the signature of the model's ``forward``.
        outputs: names of the values that the model's output is made of.
        template: the output, with a `Slot` for each value.
    """

    wires: Mapping[str, Wire]
    inputs: tuple[str, ...]
    arguments: tuple[str, ...]
    signature: inspect.Signature
    outputs: tuple[str, ...]
    template: object

    def bind(self, value: object) -> tuple[object, ...]:
        """Turn what the model is called with into the values of ``inputs``. The one place that knows the rule.

        A tuple is ``forward(*value)``, a dict is ``forward(**value)``, anything else is ``forward(value)``.

        Raises:
            GraphError: not the arguments that the model was traced with.
        """
        given = call_arguments(self.signature, value)
        if set(given) != set(self.arguments):
            raise GraphError(
                f"the model was traced with arguments ({', '.join(self.arguments)}) and is called with "
                f"({', '.join(given)}); trace it with an example that has the arguments of every call"
            )
        return tuple(given[name] for name in self.arguments)

    def live(self, assignment: Sequence[Sequence[str]], cut: int) -> tuple[str, ...]:
        """Names of the values that cross the cut before stage ``cut``, in the order in which they come to be.

        Values made before the cut that some block from the cut on reads, or that the output needs.
        """
        before = [w for names in assignment[:cut] for n in names for w in self.wires[n].writes]
        after = {r for names in assignment[cut:] for n in names for r in self.wires[n].reads} | set(self.outputs)
        return tuple(v for v in (*self.inputs, *before) if v in after)


def call_arguments(signature: inspect.Signature, value: object) -> dict[str, object]:
    """Arguments by name when a model with this signature is called with ``value`` (see `Wiring.bind`).

    None for an argument that is None by default is the same as not giving it.
    """
    args = value if isinstance(value, tuple) else () if isinstance(value, dict) else (value,)
    kwargs = value if isinstance(value, dict) else {}
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        what = f"{len(args)} positional and {sorted(map(str, kwargs))} keyword values"
        raise GraphError(
            f"forward{signature} cannot be called with {what}: {error}; an input tuple becomes *args, a dict **kwargs"
        ) from error
    defaults = signature.parameters
    return {name: item for name, item in given.items() if item is not None or defaults[name].default is not None}


@dataclass(frozen=True, eq=False)
class TracedModel:
    """A model, its graph, and its blocks as callables.

    Attributes:
        model: the user's module, untouched.
        graph: structure and parameters, without costs.
        blocks: by name, in the order of ``graph.blocks``.
        wiring: None when the model is a chain: ``value = block(value)`` one after another.
    """

    model: nn.Module
    graph: ModelGraph
    blocks: Mapping[str, StageBlock]
    wiring: Wiring | None


class StageModule(nn.Module):
    """Consecutive blocks of a chain: ``forward(value)`` runs ``value = block(value)`` for each of them.

    Parameters and buffers carry their path in the user's model. ``state_dict`` does not (it counts blocks).

    Attributes:
        blocks: what it runs, in order.
        call: runs one block; may be replaced.
    """

    def __init__(self, blocks: Sequence[StageBlock], call: BlockCall | None = None) -> None:
        super().__init__()
        self.blocks = tuple(blocks)
        self.call: BlockCall = call or _plain_call
        self.members = nn.ModuleList(block.module for block in self.blocks)

    def forward(self, value: Any) -> Any:
        """Run the blocks; takes and returns the one value that crosses a cut."""
        for block in self.blocks:
            value = self.call(block.name, block.module, value)
        return value

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters with their paths in the user's model; one that several blocks use comes once."""
        yield from self._named("named_parameters", prefix, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Buffers with their paths in the user's model."""
        yield from self._named("named_buffers", prefix, remove_duplicate)

    def _named(self, method: str, prefix: str, remove_duplicate: bool) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        for block in self.blocks:
            for local, tensor in getattr(block.module, method)(remove_duplicate=remove_duplicate):
                if not remove_duplicate or id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield (f"{prefix}." if prefix else "") + block.path(local), tensor


class GraphStageModule(StageModule):
    """Consecutive blocks of a model with skip edges.

    ``forward`` takes and returns the values that are alive at its cuts: the value itself where there is one, else a
    tuple, in which values that only later stages need pass through. The first stage takes what the model is called with
    (see `Wiring.bind`), the last returns what the model returns.
    """

    def __init__(
        self, traced: TracedModel, stage: int, assignment: Sequence[Sequence[str]], call: BlockCall | None = None
    ) -> None:
        super().__init__([traced.blocks[name] for name in assignment[stage]], call)
        assert traced.wiring is not None
        self.wiring = traced.wiring
        self.live_in = self.wiring.live(assignment, stage) if stage else None
        self.live_out = self.wiring.live(assignment, stage + 1) if stage + 1 < len(assignment) else None

    def forward(self, value: Any) -> Any:
        """Run the blocks on the values alive at the cut before; return those alive at the cut after."""
        if self.live_in is None:
            values = dict(zip(self.wiring.inputs, self.wiring.bind(value), strict=True))
        else:
            values = dict(zip(self.live_in, (value,) if len(self.live_in) == 1 else value, strict=True))
        for block in self.blocks:
            wire = self.wiring.wires[block.name]
            results = self.call(block.name, block.module, *(values[r] for r in wire.reads))
            values.update(zip(wire.writes, results, strict=True))
        if self.live_out is None:
            return _fill(self.wiring.template, values)
        out = tuple(values[name] for name in self.live_out)
        return out[0] if len(out) == 1 else out


def stage_module(
    traced: TracedModel, stage: int, assignment: Sequence[Sequence[str]], call: BlockCall | None = None
) -> StageModule:
    """Build the module of one stage, without copying a parameter.

    Args:
        traced: the model.
        stage: which stage, ``0 <= stage < len(assignment)``.
        assignment: for each stage the names of its blocks; together all blocks in a topological order.
        call: runs one block: ``call(name, module, *values)``; default ``module(*values)``.

    Raises:
        GraphError: the assignment is not all blocks once each in a topological order.
    """
    check_assignment(traced, assignment)
    if traced.wiring is None:
        return StageModule([traced.blocks[name] for name in assignment[stage]], call)
    return GraphStageModule(traced, stage, assignment, call)


def check_assignment(traced: TracedModel, assignment: Sequence[Sequence[str]]) -> None:
    """Refuse an assignment that loses, repeats or misorders blocks (`GraphError`)."""
    flat = [name for names in assignment for name in names]
    if sorted(flat) != sorted(traced.blocks):
        odd = sorted(set(flat) ^ set(traced.blocks)) or sorted({n for n in flat if flat.count(n) > 1})
        raise GraphError(f"stages of {len(flat)} blocks for a model of {len(traced.blocks)}; wrong: {', '.join(odd)}")
    place = {name: i for i, name in enumerate(flat)}
    for edge in traced.graph.edges:
        if place.get(edge.source, -1) >= place.get(edge.target, len(flat)):
            raise GraphError(f"the stages run {edge.target} before {edge.source}, which feeds it; follow the edges")


def _plain_call(name: str, module: nn.Module, *values: Any) -> Any:
    return module(*values)


def _fill(template: object, values: Mapping[str, object]) -> Any:
    """The model's output: the template with each slot replaced by its value."""
    if isinstance(template, Slot):
        return values[template.value]
    if isinstance(template, dict):
        return {key: _fill(item, values) for key, item in template.items()}
    if isinstance(template, tuple) and hasattr(template, "_fields"):
        return type(template)(*(_fill(item, values) for item in template))
    if isinstance(template, (tuple, list)):
        return type(template)(_fill(item, values) for item in template)
    return template
