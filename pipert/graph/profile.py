"""Measure what each block costs, and leave the model as it was."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from pipert.errors import GraphError
from pipert.graph.alike import alike
from pipert.graph.model_graph import INPUT, OUTPUT, Edge, ModelGraph, TensorSpec
from pipert.graph.spare import spare
from pipert.graph.stage import TracedModel, Wire, stage_module
from pipert.graph.trace import tensor_specs

Materialise = Callable[[nn.Module, str], object]
"""``materialise(module, prefix)`` fills a block's parameters on ``meta`` in place; ``prefix`` is its path or ``""``."""

SecondHalf = Callable[[nn.Module, Sequence[Any]], float]
"""``second_half(module, arguments)`` runs a block, its backward in two halves, and returns the second one's seconds."""


@dataclass(frozen=True)
class BlockCost:
    """What one micro-batch costs in a block.

    Attributes:
        forward: seconds.
        backward: seconds.
        activation_bytes: bytes kept from forward to backward.
        weight_gradient: seconds of the backward that can be put off; None if unknown.
    """

    forward: float
    backward: float
    activation_bytes: int = 0
    weight_gradient: float | None = None


def profile(
    traced: TracedModel,
    example: object,
    *,
    given: Mapping[str, BlockCost] | None = None,
    materialise: Materialise | None = None,
    repeats: int = 5,
    second_half: SecondHalf | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> ModelGraph:
    """Run an example micro-batch through the blocks and measure each.

    Each block is measured on a copy that is dropped afterwards, so weights, buffers, gradients, training modes and
    blocks on ``meta`` stay as they are; the random states of torch, NumPy and Python are put back.
    Blocks that are alike (class, settings, parameter shapes) and are fed alike are measured once. At most one block on
    ``meta`` is materialised at a time.

    Args:
        traced: from `trace`.
        example: what the model is called with, for one micro-batch, on the device to measure on.
        given: costs of some blocks by name, taken instead of measuring.
        materialise: needed where parameters are on ``meta``.
        repeats: the fastest of this many runs counts, after one to warm up: whatever disturbs a run makes it longer.
        second_half: how a backward is run in two halves, if their times are wanted.
        loss: of the model's output; it counts as a part of the last block.

    Returns:
        The graph with times in seconds, bytes kept for the backward (what autograd saves, each storage once, parameters
        and buffers left out), and specs on every edge.

    Raises:
        GraphError: an unknown block in ``given``, parameters on meta without ``materialise``, or a block that cannot be
            copied.
    """
    given = given or {}
    unknown = sorted(set(given) - set(traced.blocks))
    if unknown:
        raise GraphError(f"costs given for unknown blocks {', '.join(unknown)}; blocks are {', '.join(traced.blocks)}")
    bench = _Bench(traced, given, materialise, max(1, repeats), second_half)
    whole = stage_module(traced, 0, [list(traced.blocks)], call=bench.call)
    tensors = [t for t in tree_leaves(example) if isinstance(t, torch.Tensor)]
    devices = {t.device.index for t in (*tensors, *traced.model.parameters()) if t.is_cuda}
    with _random_states(sorted(devices)), torch.enable_grad():
        output = whole(example)
        if loss is not None:
            bench.add_loss(_Loss(loss), output)
    blocks = tuple(
        replace(b, **{item.name: getattr(cost, item.name) for item in fields(cost)})
        for b, cost in ((b, bench.costs[b.name]) for b in traced.graph.blocks)
    )
    edges = tuple(replace(e, tensors=bench.tensors(e)) for e in traced.graph.edges)
    return replace(traced.graph, blocks=blocks, edges=edges, costs="measured")


@dataclass
class _Bench:
    """Stands in for the call of each block: measures it and returns its result, cut off from the autograd graph."""

    traced: TracedModel
    given: Mapping[str, BlockCost]
    materialise: Materialise | None
    repeats: int
    second_half: SecondHalf | None
    costs: dict[str, BlockCost] = field(default_factory=dict)
    specs: dict[str, tuple[TensorSpec, ...]] = field(default_factory=dict)
    known: dict[object, tuple[Any, BlockCost]] = field(default_factory=dict)
    keys: Mapping[str, object] = field(init=False)

    def __post_init__(self) -> None:
        self.keys = alike({name: block.module for name, block in self.traced.blocks.items()})

    def call(self, name: str, module: nn.Module, *values: Any) -> Any:
        """Measure a block, or recall what one like it cost; return what it returns."""
        wiring = self.traced.wiring
        wire = Wire((name,), ()) if wiring is None else wiring.wires[name]
        self.specs.update(zip(wire.reads, map(tensor_specs, values), strict=True))
        key = (self.keys[name], tuple(map(_structure, values)), name in self.given)
        if key not in self.known:
            copy, repeats = self._copy(name, module), 0 if name in self.given else self.repeats
            result, cost = _measure(copy, values, repeats)
            self.known[key] = result, replace(cost, weight_gradient=self._weight_gradient(copy, values, cost, repeats))
        result, cost = self.known[key]
        self.costs[name] = self.given.get(name, cost)
        self.specs.update(zip(wire.writes, map(tensor_specs, result), strict=True) if wire.writes else ())
        return result

    def add_loss(self, loss: nn.Module, output: Any) -> None:
        """Measure the loss of an output, and add it to the last block."""
        last = list(self.traced.blocks)[-1]
        if last not in self.given:
            cost, (_, more) = self.costs[last], _measure(loss, (output,), self.repeats)
            self.costs[last] = replace(
                cost,
                forward=cost.forward + more.forward,
                backward=cost.backward + more.backward,
                activation_bytes=cost.activation_bytes + more.activation_bytes,
            )

    def _copy(self, name: str, module: nn.Module) -> nn.Module:
        copy = spare(name, module)
        tensors = [*copy.parameters(), *copy.buffers()]
        if any(t.is_meta for t in tensors):
            if self.materialise is None:
                raise GraphError(
                    f"block {name} has parameters on meta and cannot run; pass materialise=, or use estimate(graph)"
                )
            self.materialise(copy, self.traced.blocks[name].prefix.removesuffix("."))
        return copy

    def _weight_gradient(self, module: nn.Module, values: Sequence[Any], cost: BlockCost, repeats: int) -> float | None:
        if self.second_half is None or not repeats:
            return None
        if not _inputs(values)[0]:  # there is no first half
            return cost.backward
        return min(cost.backward, *(self.second_half(module, _inputs(values)[1]) for _ in range(repeats)))

    def tensors(self, edge: Edge) -> tuple[TensorSpec, ...]:
        """Specs of what runs along an edge; of a chain's values, which have no names, the reader's."""
        wiring = self.traced.wiring
        if wiring is None:
            return self.specs[edge.target]
        made = wiring.inputs if edge.source == INPUT else wiring.wires[edge.source].writes
        wanted = wiring.outputs if edge.target == OUTPUT else wiring.wires[edge.target].reads
        return tuple(t for v in made if v in wanted for t in self.specs.get(v, ()))


class _Loss(nn.Module):
    """A loss as a block."""

    def __init__(self, loss: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self._loss = loss

    def forward(self, output: Any) -> torch.Tensor:
        return self._loss(output)


def _measure(module: nn.Module, values: Sequence[Any], repeats: int) -> tuple[Any, BlockCost]:
    """Run a block that may be spoilt: its result, and its least cost in ``repeats`` runs."""
    parameters: list[torch.Tensor] = [p for p in module.parameters() if p.requires_grad]
    fixed = {t.untyped_storage().data_ptr() for t in [*module.parameters(), *module.buffers()]}
    kept: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in fixed:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    leaves, arguments = _inputs(values)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        result = module(*arguments)
    _backward(result, leaves + parameters)
    forward, backward = [], []
    for _ in range(repeats):
        leaves, arguments = _inputs(values)
        start = _now(leaves + parameters)
        out = module(*arguments)
        middle = _now(leaves + parameters)
        _backward(out, leaves + parameters)
        forward.append(middle - start)
        backward.append(_now(leaves + parameters) - middle)
        del out
    if not repeats:
        return _cut(result), BlockCost(0.0, 0.0)
    return _cut(result), BlockCost(min(forward), min(backward), sum(kept.values()))


def _inputs(values: Sequence[Any]) -> tuple[list[torch.Tensor], list[Any]]:
    """Fresh arguments, not leaves, so that a block may change them in place; and the leaves behind them."""
    leaves: list[torch.Tensor] = []

    def fresh(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        leaf = value.detach().requires_grad_(value.requires_grad)
        if leaf.requires_grad:
            leaves.append(leaf)
        return leaf.clone()

    return leaves, [tree_map(fresh, value) for value in values]


def _backward(result: Any, wanted: Sequence[torch.Tensor]) -> None:
    """One backward pass, which adds to the gradients of what is wanted, as that of a micro-batch does."""
    ends = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    if ends and wanted:
        torch.autograd.backward(ends, [torch.ones_like(t) for t in ends], inputs=wanted)


def _cut(value: Any) -> Any:
    """The same values without their history, wanting gradients where they did."""

    def cut(item: Any) -> Any:
        return item.detach().requires_grad_(item.requires_grad) if isinstance(item, torch.Tensor) else item

    return tree_map(cut, value)


def _structure(value: Any) -> object:
    """What must agree for two inputs to cost the same."""
    return tensor_specs(value), str(tree_map(lambda item: None if isinstance(item, torch.Tensor) else item, value))


def _now(tensors: Sequence[torch.Tensor]) -> float:
    if any(t.is_cuda for t in tensors):
        torch.cuda.synchronize()
    return perf_counter()


@contextmanager
def _random_states(devices: Sequence[int]) -> Iterator[None]:
    """Put the states of torch's, NumPy's and Python's global generators back at the end."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
