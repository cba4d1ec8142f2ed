"""Half precision: sums in fp32, the same numbers in every layout, and one decision about every update."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipert.comm.local import run_ranks
from pipert.comm.mesh import Mesh
from pipert.engine.pipeline import Pipeline
from pipert.engine.reference import reference_step
from pipert.errors import ConfigError
from pipert.models.loss import CausalLMLoss
from pipert.optim import LossScale, Precision
from tests.engine.world import Outcome, assert_same, gpt, run_pipeline, tokens, tower, vectors

SPLIT = ["1f1b", "zb-h1", "zb-v"]


class Scaled(nn.Module):
    """A weight whose gradient is the mean of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Linear(nn.Module):
    """The same as a matrix product, which a backward in two halves puts off."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def total(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.float().sum()


def small_gradients() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches of gradient 1.0, then 256 times 0.002, when 257 of them count the same."""
    values = [1.0, *[0.002] * 256]
    return [(torch.full((1, 4), value, dtype=torch.bfloat16), torch.zeros(1)) for value in values]


@pytest.mark.parametrize("schedule", SPLIT)
def test_many_small_gradients_of_a_bf16_weight_add_up(schedule: str) -> None:
    models = [nn.Sequential(nn.Linear(4, 4), Linear()).bfloat16() for _ in range(2)]
    for model in models:
        model[0].weight.data.copy_(torch.eye(4))
        model[0].bias.data.zero_()

    def rank(transport: Any) -> list[torch.Tensor]:
        pipe = Pipeline(
            models[transport.rank], total, Mesh.local(pp=2), cuts=None if schedule == "zb-v" else [1, 1],
            schedule=schedule, microbatches=257, count_fn=lambda target: 1,
        ) if schedule != "zb-v" else Pipeline(
            nn.Sequential(nn.Identity(), nn.Identity(), *models[transport.rank]), total, Mesh.local(pp=2),
            cuts=[1, 1, 1, 1], schedule=schedule, microbatches=257, count_fn=lambda target: 1,
        )
        pipe.step(small_gradients())
        return [p.grad * 257 for name, p in pipe.named_parameters() if name.endswith("linear.weight")]

    gradients = [gradient for found in run_ranks(2, rank) for gradient in found]
    assert [g.dtype for g in gradients] == [torch.float32]
    assert gradients[0].flatten().tolist() == pytest.approx([1.512] * 4, abs=3e-3)
