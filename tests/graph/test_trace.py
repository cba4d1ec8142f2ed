from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipert.errors import GraphError
from pipert.graph import INPUT, OUTPUT, stage_module, trace
from tests.graph.models import Layer, Shared, Skipping, Towers


def edges(model: nn.Module, example: object = None) -> list[str]:
    return [str(edge) for edge in trace(model, example).graph.edges]


def test_the_children_of_a_sequential_are_its_blocks() -> None:
    shared = nn.Linear(4, 4)
    graph = trace(nn.Sequential(nn.Linear(3, 4), shared, nn.ReLU(), shared)).graph
    assert [b.name for b in graph.blocks] == ["0", "1", "2", "3"]
    assert [b.kind for b in graph.blocks] == ["Linear", "Linear", "ReLU", "Linear"]
    assert graph.is_chain
    assert graph.numel == 3 * 4 + 4 + 4 * 4 + 4
    assert [group.names for group in graph.tied] == [("1.weight", "3.weight"), ("1.bias", "3.bias")]
    assert graph.blocks[0].parameters[0].shape == (4, 3)


def test_a_model_may_name_its_own_chain_also_where_the_list_has_the_same_name() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._modules["blocks"] = nn.ModuleList(Layer(8) for _ in range(3))
            self.head = nn.Linear(8, 8)

        def blocks(self) -> list[tuple[str, nn.Module]]:
            inner = self._modules["blocks"]
            assert isinstance(inner, nn.ModuleList)
            return [*((f"blocks.{i}", layer) for i, layer in enumerate(inner)), ("head", self.head)]

    traced = trace(Own())
    assert list(traced.blocks) == ["blocks.0", "blocks.1", "blocks.2", "head"]
    assert traced.graph.blocks[1].parameters[2].name == "blocks.1.linear.weight"
    assert traced.wiring is None


def test_wrapped_blocks_keep_the_models_parameter_names() -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * 2

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.second = nn.BatchNorm1d(8)

        def blocks(self) -> list[tuple[str, nn.Module]]:
            return [("in", Wrapper(self.first)), ("out", Wrapper(self.second))]

    graph = trace(Own()).graph
    assert [p.name for b in graph.blocks for p in b.parameters] == [
        "first.weight",
        "first.bias",
        "second.weight",
        "second.bias",
    ]
    assert graph.blocks[1].buffer_bytes == 8 * 4 + 8 * 4 + 8


def test_a_skip_edge_from_block_1_into_block_6_is_an_edge() -> None:
    found = edges(Skipping())
    assert found == [
        "embedding -> layers.0",
        "layers.0 -> layers.1",
        "layers.1 -> layers.2",
        "layers.2 -> layers.3",
        "layers.3 -> layers.4",
        "layers.4 -> layers.5",
        "layers.5 -> layers.6",
        "layers.1 -> layers.6",
        "layers.6 -> layers.7",
        "layers.7 -> norm",
    ]


def test_parameters_used_between_blocks_belong_to_the_block_that_uses_them() -> None:
    graph = trace(Skipping()).graph
    names = {b.name: [p.name for p in b.parameters] for b in graph.blocks}
    assert sorted(names["embedding"]) == ["embedding.weight", "position"]
    assert sorted(names["norm"]) == ["embedding.weight", "norm.bias", "norm.weight"]
    (group,) = graph.tied
    assert group.blocks == ("embedding", "norm")
    lookup = {b.name: p.lookup for b in graph.blocks for p in b.parameters if p.identity == "embedding.weight"}
    assert lookup == {"embedding": True, "norm": False}
    assert graph.numel == sum(p.numel() for p in Skipping().parameters())


def test_a_residual_around_blocks_stays_inside_one_block() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x

    assert trace(Residual()).graph.is_chain


def test_branches_inputs_and_outputs_are_edges() -> None:
    example = {"a": torch.zeros(2, 16), "b": torch.zeros(2, 16)}
    graph = trace(Towers(), example).graph
    assert {str(e) for e in graph.edges if INPUT in str(e)} == {"<input> -> right.0"}
    assert {str(e) for e in graph.edges if OUTPUT in str(e)} == {"left.2 -> <output>", "right.2 -> <output>"}
    assert {str(e) for e in graph.edges if "> join" in str(e)} == {"left.2 -> join", "right.2 -> join"}


def test_a_module_called_again_is_another_block_with_tied_parameters() -> None:
    graph = trace(Shared()).graph
    assert [b.name for b in graph.blocks] == ["first", "layer", "layer#2", "layer#3"]
    assert len(graph.tied) == 4
    assert graph.tied[0].blocks == ("layer", "layer#2", "layer#3")
    assert graph.numel == sum(p.numel() for p in Shared().parameters())


def test_lists_below_other_modules_are_found_and_other_modules_stay_whole() -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte = nn.Embedding(7, 8)
            self.h = nn.ModuleList(Layer(8) for _ in range(2))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            positions = torch.arange(0, ids.shape[1], device=ids.device)
            x = self.wte(ids) + self.wte(positions)
            for layer in self.h:
                x = layer(x)
            return x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"body": Body(), "head": nn.Sequential(nn.Linear(8, 8), nn.ReLU())})

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.parts["head"](self.parts["body"](ids))

    names = [b.name for b in trace(Model()).graph.blocks]
    assert names == ["parts.body.wte", "parts.body.wte#2", "parts.body.h.0", "parts.body.h.1", "parts.head"]


def test_without_a_list_a_sequential_inside_is_cut() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) + 1

    assert [b.name for b in trace(Model()).graph.blocks] == ["body.0", "body.1", "body.2"]


HOOKS = ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]


@pytest.mark.parametrize("register", HOOKS)
@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(4, 4)), Skipping()])
def test_a_hook_on_a_module_that_is_cut_is_refused_since_it_would_not_run(model: nn.Module, register: str) -> None:
    handle = getattr(model, register)(lambda *_: None)
    with pytest.raises(
        GraphError, match=r"the model itself has .* hooks, which would not run.*register them on blocks"
    ):
        trace(model)
    handle.remove()
    trace(model)


def test_a_value_made_of_a_table_alone_is_made_where_it_is_needed_not_sent_there() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(8))
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x) + self.table * 0.1
            return x

    assert trace(Scaled()).graph.is_chain


def test_hooks_on_blocks_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].register_forward_hook(lambda module, inputs, output: output * 2)
    stage = stage_module(trace(model), 0, [["0", "1"]])
    x = torch.randn(3, 4)
    assert torch.equal(stage(x), model(x))


def test_an_argument_given_as_the_none_that_it_is_by_default_is_not_given() -> None:
    ids = torch.zeros(1, 4, dtype=torch.long)
    assert edges(Skipping(), {"ids": ids, "bias": None}) == edges(Skipping(), (ids, None)) == edges(Skipping())
    traced = trace(Skipping(), ids)
    stage = stage_module(traced, 0, [list(traced.blocks)])
    assert torch.equal(stage((ids, None)), stage(ids))


def test_an_optional_argument_is_there_only_if_the_example_has_it() -> None:
    ids, bias = torch.zeros(1, 4, dtype=torch.long), torch.zeros(61)
    assert "<input> -> norm" not in edges(Skipping())
    assert "<input> -> norm" in edges(Skipping(), (ids, bias))
    assert "<input> -> norm" in edges(Skipping(), {"ids": ids, "bias": bias})


class Listed(nn.Module):
    """Two layers and a forward given from outside."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.free = nn.Parameter(torch.zeros(4))
        self.run = run
        self.count = 0

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, x + self.free)


def branch(m: Listed, x: torch.Tensor) -> torch.Tensor:
    return m.layers[0](x) if x.sum() > 0 else m.layers[1](x)


def loop(m: Listed, x: torch.Tensor) -> torch.Tensor:
    for _ in range(x.shape[0]):
        x = m.layers[1](m.layers[0](x))
    return x


def no_grad(m: Listed, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        x = m.layers[0](x)
    return m.layers[1](x)


def autocast(m: Listed, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return m.layers[1](m.layers[0](x))


def functional_dropout(m: Listed, x: torch.Tensor) -> torch.Tensor:
    return m.layers[1](F.dropout(m.layers[0](x), 0.5, m.training))


def counting(m: Listed, x: torch.Tensor) -> torch.Tensor:
    m.count += 1
    return m.layers[1](m.layers[0](x))


def keeping(m: Listed, x: torch.Tensor) -> torch.Tensor:
    m.last = m.layers[0](x)
    return m.layers[1](m.last)


def frozen_weights(m: Listed, x: torch.Tensor) -> torch.Tensor:
    penalty = sum(p.square().sum() for p in m.parameters())
    return m.layers[1](m.layers[0](x)) + penalty


def stale_name(m: Listed, x: torch.Tensor) -> torch.Tensor:
    y = kept = m.layers[0](x)
    y += 1
    return m.layers[1](y) + kept


def numbers(m: Listed, x: torch.Tensor) -> torch.Tensor:
    return m.layers[1](m.layers[0](x)) / math.sqrt(x.shape[-1])


def unused(m: Listed, x: torch.Tensor) -> torch.Tensor:
    return m.layers[0](x)


def returns_parameter(m: Listed, x: torch.Tensor) -> Any:
    return m.layers[1](m.layers[0](x)), m.free


def no_block(m: Listed, x: torch.Tensor) -> torch.Tensor:
    return x


def noise(m: Listed, x: torch.Tensor) -> torch.Tensor:
    return m.layers[1](m.layers[0](x)) + torch.randn(4)


def layer_drop(m: Listed, x: torch.Tensor) -> torch.Tensor:
    x = m.layers[0](x)
    return m.layers[1](x) if torch.rand([]) < 0.5 else x


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (branch, r"cannot be traced \(.*test_trace.py:\d+, `return m.layers.*a branch or loop depends on the value"),
        (loop, r"cannot be traced \(.*test_trace.py:\d+, `for _ in range"),
        (no_grad, "no_grad or autocast around blocks would be lost; make the model an nn.Sequential"),
        (autocast, "no_grad or autocast around blocks would be lost"),
        (functional_dropout, "differs between training and evaluation outside its blocks; move"),
        (counting, r"assigns self.count, which a pipeline loses; make the model an nn.Sequential, or give it a method"),
        (keeping, "assigns self.last"),
        (frozen_weights, "computed from parameters alone"),
        (stale_name, r"changes linear|changes layers_0 in place and .* uses the old name afterwards; write x = x \+ y"),
        (numbers, "cannot be traced"),
        (unused, "2 parameters belong to no block: layers.1.weight, layers.1.bias"),
        (returns_parameter, "returns free itself; return what a block makes of it"),
        (no_block, "calls no submodule"),
        (noise, "random numbers drawn outside blocks would be the same in every step"),
        (layer_drop, r"test_trace.py:\d+, `return m.layers.*random numbers drawn outside blocks"),
    ],
)
def test_what_would_be_traced_wrongly_is_refused_with_reason_and_remedy(run: Callable[..., Any], reason: str) -> None:
    with pytest.raises(GraphError, match=reason):
        trace(Listed(run))


class Empty(nn.Module):
    def __init__(self, listed: object) -> None:
        super().__init__()
        self.listed = listed

    def blocks(self) -> object:
        return self.listed


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(), "Sequential has no blocks; at least one is needed"),
        (nn.ModuleList([nn.Linear(2, 2)]), "ModuleList has no forward, so the order of its blocks is unknown"),
        (nn.Module(), "Module has no forward"),
        (math.sqrt, "the model is a builtin_function_or_method, not an nn.Module; make the model"),
        (nn.Sequential(nn.LazyLinear(3)), "parameters without a shape yet: 0.weight, 0.bias; run lazy modules once"),
        (Empty([]), "Empty has no blocks"),
        (Empty([nn.Linear(2, 2)]), r"Empty.blocks\(\) must return \[\(name, module\), ...\], not \[Linear"),
        (Empty([("a", nn.Linear(2, 2))]), "blocks hold parameters that the model does not: a.weight, a.bias; register"),
        (Empty([("a", nn.ReLU()), ("a", nn.ReLU())]), "blocks named twice: a"),
    ],
)
def test_a_model_without_proper_blocks_is_refused(model: nn.Module, reason: str) -> None:
    with pytest.raises(GraphError, match=reason):
        trace(model)


def test_a_model_compiled_as_a_whole_is_refused() -> None:
    compiled = nn.Module()
    compiled.add_module("_orig_mod", nn.Sequential(nn.Linear(2, 2)))  # what torch.compile makes, without its seconds
    with pytest.raises(GraphError, match="the model is compiled as a whole; give the model itself"):
        trace(compiled)


def test_tracing_runs_nothing_and_changes_nothing() -> None:
    model = Skipping().eval()
    model.layers[3].train()
    calls: list[object] = []
    model.layers[0].register_forward_hook(lambda *a: calls.append(a))
    modes = [m.training for m in model.modules()]
    state = {k: (id(v), v.clone()) for k, v in model.state_dict(keep_vars=True).items()}
    random = torch.get_rng_state()
    trace(model)
    assert [m.training for m in model.modules()] == modes
    assert all(
        id(v) == state[k][0] and torch.equal(v, state[k][1]) for k, v in model.state_dict(keep_vars=True).items()
    )
    assert torch.equal(torch.get_rng_state(), random)
    assert not calls
    assert all(p.grad is None for p in model.parameters())


def test_parameters_may_be_on_meta() -> None:
    with torch.device("meta"):
        model = Skipping()
    assert trace(model).graph == trace(Skipping()).graph


def test_threads_may_trace_while_others_run_modules() -> None:
    """torch.fx's own tracer patches nn.Module for the whole process: other threads' calls end in its graph."""
    stop, errors = threading.Event(), list[BaseException]()
    model, want = Skipping(), trace(Skipping()).graph
    ids = torch.randint(0, 61, (2, 8))
    expected = model(ids)

    def run() -> None:
        try:
            while not stop.is_set():
                assert torch.equal(model(ids), expected)
        except BaseException as error:
            errors.append(error)

    runner = threading.Thread(target=run)
    runner.start()
    try:
        for _ in range(10):
            assert trace(Skipping()).graph == want
    finally:
        stop.set()
        runner.join()
    assert not errors
