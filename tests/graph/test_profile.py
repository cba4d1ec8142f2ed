from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pipert.errors import GraphError
from pipert.gpt_config import GPTConfig
from pipert.graph import BlockCost, profile, trace
from pipert.layers.materialise import materialise
from pipert.models.gpt import GPT
from tests.graph.models import Layer, Shared, Skipping, Towers, nested, nested_input


class Busy(nn.Module):
    """Everything that a forward may do to a module and to the world."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.rows = nn.Embedding(9, 8, max_norm=0.1)  # its forward renormalises the weight in place
        self.drop = nn.Dropout(0.5)
        self.seen: list[int] = []
        self.last: torch.Tensor | None = None
        self.generator = torch.Generator()
        self.lock = threading.Lock()  # resists copying

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.lock:
            self.seen.append(1)
        noise = torch.rand(8, generator=self.generator) + random.random() + np.random.rand()
        self.last = self.drop(self.norm(x)) + self.rows(torch.tensor([1])) + noise
        return torch.relu_(self.last)


def test_profiling_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Busy(), nn.Linear(8, 8), nn.ReLU(inplace=True))
    model[2].eval()
    model[0].weight.grad = torch.ones(8, 8)
    fired: list[object] = []
    model[0].weight.register_hook(lambda g: fired.append(g))
    model[2].weight.register_post_accumulate_grad_hook(lambda p: fired.append(p))
    busy, x = model[1], torch.randn(4, 8)
    before = {k: (id(v), v.clone()) for k, v in model.state_dict(keep_vars=True).items()}
    modes = [m.training for m in model.modules()]
    generators = (torch.get_rng_state(), busy.generator.get_state(), random.getstate(), np.random.get_state())
    inputs = x.clone()
    profile(trace(model), x)
    after = model.state_dict(keep_vars=True)
    assert all(id(v) == before[k][0] and torch.equal(v, before[k][1]) for k, v in after.items())
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert torch.equal(busy.generator.get_state(), generators[1])
    assert random.getstate() == generators[2]
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), generators[3], strict=True))
    assert torch.equal(model[0].weight.grad, torch.ones(8, 8))
    assert all(p.grad is None for p in model.parameters() if p is not model[0].weight)
    assert not fired
    assert not busy.seen
    assert busy.last is None
    assert torch.equal(x, inputs)


def test_times_follow_the_work() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2048), nn.Linear(2048, 64))
    small, large, _ = profile(trace(model), torch.randn(512, 64)).blocks
    assert 0 < (small.forward or 0) < (large.forward or 0)
    assert 0 < (small.backward or 0) < (large.backward or 0)


def test_activation_bytes_are_what_autograd_keeps_without_parameters() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Identity(), nn.Linear(16, 4))
    graph = profile(trace(model), torch.randn(5, 8))
    assert [b.activation_bytes for b in graph.blocks] == [5 * 8 * 4, 5 * 16 * 4, 0, 5 * 16 * 4]


def test_a_view_counts_the_storage_that_it_keeps_and_counts_it_once() -> None:
    class Halves(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = x.chunk(2, dim=-1)
            return a * b * a

    graph = profile(trace(nn.Sequential(nn.Linear(8, 8), Halves())), torch.randn(5, 8))
    assert graph.blocks[1].activation_bytes == 5 * 8 * 4 + 5 * 4 * 4, "the whole input once, and the first product"


def test_edges_carry_the_specs_of_their_tensors() -> None:
    graph = profile(trace(Skipping()), torch.randint(0, 61, (2, 16)))
    assert {e.nbytes for e in graph.edges} == {2 * 16 * 32 * 4}
    (spec,) = graph.edges[0].tensors or ()
    assert (spec.shape, spec.dtype, spec.requires_grad) == ((2, 16, 32), "float32", True)
    chain = profile(trace(nested()), nested_input())
    assert [(t.shape, t.dtype, t.requires_grad) for t in chain.edges[0].tensors or ()] == [
        ((2, 5, 8), "float32", True),
        ((2, 5), "int64", False),
        ((2, 5), "bool", False),
        ((0,), "float32", False),
        ((2, 5, 8), "float32", False),
        ((2, 5), "int64", False),
    ]


def test_edges_from_the_input_and_to_the_output_carry_theirs() -> None:
    inputs = {"a": torch.randn(3, 16), "b": torch.randn(3, 16)}
    graph = profile(trace(Towers(), inputs), inputs)
    outside = {str(e): e.nbytes for e in graph.edges if "<" in str(e)}
    assert outside == {"<input> -> right.0": 192, "left.2 -> <output>": 192, "right.2 -> <output>": 192}
    assert all(e.nbytes for e in graph.edges)


def test_blocks_below_the_first_trainable_one_have_no_backward() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    model[0].requires_grad_(False)
    first, second, third = profile(trace(model), torch.randn(4, 8)).blocks
    assert (first.backward, first.activation_bytes) == (pytest.approx(0, abs=1e-5), 0)
    assert (second.backward or 0) > 0
    assert (third.backward or 0) > 0


@pytest.mark.parametrize("gradients", [True, False])
def test_gradients_are_measured_also_where_they_are_switched_off(gradients: bool) -> None:
    with torch.set_grad_enabled(gradients):
        graph = profile(trace(nn.Sequential(nn.Linear(8, 8))), torch.randn(4, 8))
    assert graph.blocks[0].activation_bytes == 4 * 8 * 4


class Counting(nn.Module):
    calls = 0

    def __init__(self, index: int, window: int, width: int = 8) -> None:
        super().__init__()
        self.index, self.window = index, window
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counting.calls += 1
        return self.linear(x)


@pytest.mark.parametrize(
    ("windows", "kinds"),
    [([4] * 6, 1), ([4, 8] * 3, 2), ([1, 2, 3, 4, 5, 6], 1)],
    ids=["alike", "alternating", "index"],
)
def test_blocks_that_are_alike_are_measured_once(windows: list[int], kinds: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), *(Counting(i, w) for i, w in enumerate(windows)))
    Counting.calls = 0
    graph = profile(trace(model), torch.randn(4, 8), repeats=3)
    assert Counting.calls == kinds * 4, "one to warm up and three to measure"
    assert len({(b.forward, b.backward) for b in graph.blocks[1:]}) == kinds


def test_blocks_that_differ_in_shape_input_or_settings_are_measured_apart() -> None:
    model = nn.Sequential(
        nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.AvgPool1d(2), nn.AvgPool1d(4)
    )
    graph = profile(trace(model), torch.randn(4, 8))
    assert len({b.forward for b in graph.blocks}) == 5, "the first gets no gradient, pools differ in width"


def test_alike_blocks_of_a_traced_module_are_recognised() -> None:
    graph = profile(trace(Skipping()), torch.randint(0, 61, (2, 16)))
    middle = {b.forward for b in graph.blocks if b.name in ("layers.0", "layers.2", "layers.3", "layers.5", "layers.7")}
    assert len(middle) == 1
    assert profile(trace(Shared()), torch.randn(2, 8)).blocks[3].forward is not None


def test_given_costs_are_taken() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    graph = profile(trace(model), torch.randn(4, 8), given={"1": BlockCost(7.0, 8.0, 9)})
    assert (graph.blocks[1].forward, graph.blocks[1].backward, graph.blocks[1].activation_bytes) == (7.0, 8.0, 9)
    assert (graph.blocks[0].forward or 9) < 1
    with pytest.raises(GraphError, match="costs given for unknown blocks 2; blocks are 0, 1"):
        profile(trace(model), torch.randn(4, 8), given={"2": BlockCost(1, 1)})


def test_blocks_on_meta_are_materialised_one_at_a_time_and_stay_on_meta() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(11, 8), *(Layer(8, i) for i in range(4)), nn.Linear(8, 11))
    filled: list[str] = []

    def materialise(module: nn.Module, prefix: str) -> None:
        filled.append(prefix)
        module.to_empty(device="cpu")
        for p in module.parameters():
            nn.init.uniform_(p)

    graph = profile(trace(model), torch.randint(0, 11, (2, 5)), materialise=materialise)
    assert filled == ["0", "1", "5"], "the four layers are alike"
    assert all(p.is_meta for p in model.parameters())
    assert all((b.forward or 0) > 0 for b in graph.blocks)
    with pytest.raises(GraphError, match="block 0 has parameters on meta and cannot run; pass materialise="):
        profile(trace(model), torch.randint(0, 11, (2, 5)))


def test_a_block_that_cannot_be_copied_is_refused_with_its_name() -> None:
    class Stuck(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("no copies of me")

    with pytest.raises(
        GraphError, match=r"block 0 \(Stuck\) cannot be copied to be measured: no copies of me; use estimate"
    ):
        profile(trace(nn.Sequential(Stuck(2, 2))), torch.randn(1, 2))


def test_a_layers_own_name_in_its_text_does_not_make_blocks_differ() -> None:
    model = GPT(GPTConfig(layers=4, hidden=16, heads=2, sequence=8, vocabulary=11, dropout=0.1))

    def fill(module: nn.Module, prefix: str) -> None:
        materialise(module, prefix, "cpu", None, 0)

    graph = profile(trace(model), torch.randint(0, 11, (2, 8)), materialise=fill)
    assert len({b.forward for b in graph.blocks if b.name.startswith("blocks.")}) == 1


def test_a_loss_counts_as_a_part_of_the_last_block() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), torch.randn(4, 8)

    def slow(output: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return output.exp().sum()

    without, with_loss = profile(trace(model), x), profile(trace(model), x, loss=slow)
    last = with_loss.blocks[1].forward
    assert last is not None and last >= 0.02
    kept = [graph.blocks[1].activation_bytes for graph in (without, with_loss)]
    assert kept[0] is not None and kept[1] == kept[0] + 4 * 4 * 4
    given = {"1": BlockCost(1.0, 2.0)}
    assert profile(trace(model), x, loss=slow, given=given).blocks[1].forward == 1.0
