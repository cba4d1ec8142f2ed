from __future__ import annotations

import pytest
import torch
from torch import nn

from pipert.graph import estimate, trace
from tests.graph.models import Skipping


def test_an_embedding_costs_little_and_a_tied_head_costs_its_product() -> None:
    graph = estimate(trace(Skipping()).graph)
    cost = {b.name: b.cost or 0.0 for b in graph.blocks}
    assert cost["norm"] == pytest.approx(cost["layers.3"] * 61 / 32, rel=0.03), "61 x 32 against 32 x 32 weights"
    assert cost["embedding"] < 0.5 * cost["layers.3"], "positions are counted, the 61 x 32 lookup is not"
    assert graph.costs == "estimated"
    assert all(b.activation_bytes is None for b in graph.blocks)


def test_no_block_is_free_and_equal_blocks_cost_the_same() -> None:
    graph = estimate(trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))).graph)
    first, middle, last = graph.blocks
    assert middle.forward == pytest.approx(0.01 * 2 * 64 / 1e12)
    assert first.forward == last.forward == pytest.approx(1.01 * 2 * 64 / 1e12)
    assert (first.backward, middle.backward, last.backward) == (first.forward, middle.forward, 2 * (last.forward or 0))


def test_blocks_below_the_first_trainable_one_have_no_backward() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    for part in (model[0], model[1], model[3]):
        part.requires_grad_(False)
    times = [(b.backward or 0) / (b.forward or 1) for b in estimate(trace(model).graph).blocks]
    assert times == [0, 0, 1, 1]


def test_a_model_without_matrices_is_estimated_too() -> None:
    blocks = estimate(trace(nn.Sequential(nn.ReLU(), nn.Dropout())).graph).blocks
    assert blocks[0].forward == blocks[1].forward
    assert (blocks[0].forward or 0) > 0
    assert torch.isfinite(torch.tensor(blocks[0].forward or 0))
