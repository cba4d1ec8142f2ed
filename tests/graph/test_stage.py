from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipert.errors import GraphError
from pipert.graph import StageModule, TracedModel, stage_module, trace
from tests.graph.models import Early, InPlace, Layer, Shared, Skipping, Towers, nested, nested_input

Assignment = list[list[str]]


def assign(names: list[str], cuts: tuple[int, ...]) -> Assignment:
    places = [0, *cuts, len(names)]
    return [names[places[s] : places[s + 1]] for s in range(len(places) - 1)]


def run(traced: TracedModel, assignment: Assignment, value: Any) -> Any:
    for stage in range(len(assignment)):
        value = stage_module(traced, stage, assignment)(value)
    return value


def leaves(value: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def same(model: nn.Module, traced: TracedModel, assignment: Assignment, inputs: Any, expected: Any) -> None:
    """Outputs and every gradient are bitwise those of the model itself."""
    found = run(traced, assignment, inputs)
    assert torch.utils._pytree.tree_structure(found) == torch.utils._pytree.tree_structure(expected)
    assert all(torch.equal(a, b) for a, b in zip(leaves(found), leaves(expected), strict=True))
    parameters = list(model.parameters())
    wanted, got = (
        torch.autograd.grad([t.square().sum() for t in leaves(v) if t.requires_grad], parameters, retain_graph=True)
        for v in (expected, found)
    )
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(wanted, got, strict=True))


@pytest.mark.parametrize("cuts", [(), (1,), (3, 6), (2, 4, 6), tuple(range(1, 10))])
def test_the_skip_from_block_1_into_block_6_passes_through_every_stage_between(cuts: tuple[int, ...]) -> None:
    model = Skipping().double()
    traced = trace(model)
    ids = torch.randint(0, 61, (2, 16))
    same(model, traced, assign(list(traced.blocks), cuts), ids, model(ids))


def test_stages_of_a_middle_cut_hand_over_the_values_alive_there() -> None:
    traced = trace(Skipping())
    assignment = assign(list(traced.blocks), (4, 6, 8))
    value: Any = torch.randint(0, 61, (2, 16))
    kinds = []
    for stage in range(3):
        value = stage_module(traced, stage, assignment)(value)
        kinds.append(len(value) if isinstance(value, tuple) else "one")
    assert kinds == [2, 2, "one"], "the skip value rides along until layers.6 has used it"


@pytest.mark.parametrize("cuts", [(), (1,), (2,), (1, 2, 3)])
def test_values_that_only_the_output_needs_live_until_the_last_stage(cuts: tuple[int, ...]) -> None:
    model = Early().double()
    traced = trace(model)
    x = torch.randn(3, 8).double()
    same(model, traced, assign(list(traced.blocks), cuts), x, model(x))


@pytest.mark.parametrize("cuts", [(), (1,), (2,), (3,), (1, 2, 3)])
def test_changes_in_place_between_blocks_keep_their_order(cuts: tuple[int, ...]) -> None:
    model = InPlace().double()
    traced = trace(model)
    inputs = torch.randn(3, 8).double(), torch.randn(3, 8).double()
    same(model, traced, assign(list(traced.blocks), cuts), inputs, model(*inputs))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_branches_run_right_in_every_topological_order(data: st.DataObject) -> None:
    torch.manual_seed(0)
    model = Towers().double()
    inputs = {"a": torch.randn(3, 16).double(), "b": torch.randn(3, 16).double(), "scale": 2.0}
    traced = trace(model, inputs)
    order: list[str] = []
    while len(order) < len(traced.blocks):
        needs = {
            n: {e.source for e in traced.graph.edges if e.target == n and e.source in traced.blocks}
            for n in traced.blocks
        }
        ready = [n for n in traced.blocks if n not in order and needs[n] <= set(order)]
        order.append(data.draw(st.sampled_from(ready)))
    cuts = data.draw(st.lists(st.integers(1, 6), max_size=4, unique=True))
    same(model, traced, assign(order, tuple(sorted(cuts))), inputs, model(**inputs))


def test_the_input_is_one_value_for_a_chain_and_arguments_for_a_traced_module() -> None:
    chain = trace(nested())
    value = nested_input()
    assert torch.equal(run(chain, assign(list(chain.blocks), (2,)), value), chain.model(value))
    model = Towers()
    a, b = torch.randn(2, 16), torch.randn(2, 16)
    traced = trace(model, (a, b))
    whole = assign(list(traced.blocks), ())
    for inputs in ((a, b), {"a": a, "b": b}, {"b": b, "a": a}):
        assert torch.equal(run(traced, whole, inputs).logits, model(a, b).logits)


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (torch.zeros(2, 16), r"cannot be called with 1 positional and \[\] keyword values: missing .*'b'"),
        ({"a": 1, "c": 2}, "got an unexpected keyword argument 'c'|missing"),
        ((1, 2, 3), "3 positional"),
        ({"a": 1, "b": 2, "scale": 2.0}, r"traced with arguments \(a, b\) and is called with \(a, b, scale\)"),
    ],
)
def test_other_arguments_than_those_traced_are_refused(inputs: Any, reason: str) -> None:
    traced = trace(Towers())
    with pytest.raises(GraphError, match=reason):
        run(traced, assign(list(traced.blocks), ()), inputs)


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_chains_of_nested_values_run_right_at_every_cut(stages: int) -> None:
    model = nested().double()
    inputs = {k: v.double() if k == "x" else v for k, v in nested_input().items()}
    traced = trace(model)
    for cuts in combinations(range(1, 5), stages - 1):
        same(model, traced, assign(list(traced.blocks), cuts), inputs, model(inputs))


def test_stage_parameters_are_the_models_own_under_their_names() -> None:
    for model in (Skipping(), Shared(), nn.Sequential(Layer(8), nn.BatchNorm1d(5), Layer(8))):
        traced = trace(model)
        names = list(traced.blocks)
        own = dict(model.named_parameters(remove_duplicate=False))
        buffers = dict(model.named_buffers())
        found: set[str] = set()
        for stage, _ in enumerate(assignment := assign(names, (1, 2))):
            module = stage_module(traced, stage, assignment)
            for name, parameter in module.named_parameters():
                assert own[name] is parameter
                found.add(name)
            assert all(buffers[name] is buffer for name, buffer in module.named_buffers())
            assert len(list(module.parameters())) == len({id(p) for p in module.parameters()})
        assert {id(own[name]) for name in found} == {id(p) for p in model.parameters()}


def test_names_of_a_stage_follow_parameters_that_were_replaced() -> None:
    """Blocks on meta get new parameters when they are materialised."""
    traced = trace(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    module = stage_module(traced, 1, [["0"], ["1"]])
    new = nn.Parameter(torch.zeros(2, 2))
    module.blocks[0].module.weight = new
    assert dict(module.named_parameters())["1.weight"] is new


def test_training_mode_reaches_the_blocks() -> None:
    model = Skipping()
    traced = trace(model)
    stage_module(traced, 0, assign(list(traced.blocks), (3,))).eval()
    assert [layer.training for layer in model.layers[:3]] == [False, False, True]


@pytest.mark.parametrize("model", [Skipping(), nn.Sequential(nn.Embedding(61, 4), nn.Linear(4, 4))])
def test_every_block_runs_through_the_hook(model: nn.Module) -> None:
    traced = trace(model)
    calls = []

    def call(name: str, module: nn.Module, *values: Any) -> Any:
        calls.append(name)
        return torch.utils.checkpoint.checkpoint(module, *values, use_reentrant=False)

    assignment = assign(list(traced.blocks), (1,))
    ids = torch.randint(0, 61, (2, 4))
    value: Any = ids
    for stage in range(2):
        module = stage_module(traced, stage, assignment, call)
        assert isinstance(module, StageModule)
        value = module(value)
    assert calls == list(traced.blocks)
    assert torch.equal(value, model(ids))


@pytest.mark.parametrize(
    ("assignment", "reason"),
    [
        ([["0", "1"]], "stages of 2 blocks for a model of 3; wrong: 2"),
        ([["0", "1"], ["1", "2"]], "wrong: 1"),
        ([["0", "1"], ["2", "x"]], "wrong: x"),
        ([["1", "0"], ["2"]], "the stages run 1 before 0, which feeds it"),
        ([["0"], ["2"], ["1"]], "run 2 before 1"),
    ],
)
def test_an_assignment_that_loses_or_misorders_blocks_is_refused(assignment: Assignment, reason: str) -> None:
    traced = trace(nn.Sequential(nn.ReLU(), nn.ReLU(), nn.ReLU()))
    with pytest.raises(GraphError, match=reason):
        stage_module(traced, 0, assignment)


def test_the_models_assertions_still_hold() -> None:
    traced = trace(Skipping())
    module = stage_module(traced, 0, assign(list(traced.blocks), (1,)))
    with pytest.raises(AssertionError, match=r"assert in .*models.py:\d+ failed"):
        module(torch.zeros(1, 17, dtype=torch.long))
