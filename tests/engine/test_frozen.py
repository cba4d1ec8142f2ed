"""Frozen parameters: no gradient, no message, no change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipert.comm.local import run_ranks
from pipert.comm.mesh import Mesh
from pipert.engine.pipeline import Pipeline
from tests.engine.world import (
    ADAMW,
    SCHEDULES,
    assert_same,
    gpt,
    parts,
    run_pipeline,
    run_plain,
    seeded,
    token_loss,
    tokens,
)


class Adapter(nn.Module):
    """A low-rank addition to a block."""

    def __init__(self, block: nn.Module, width: int) -> None:
        super().__init__()
        self.block = block
        self.down = nn.Linear(width, 2, bias=False)
        self.up = nn.Linear(2, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) + self.up(self.down(x))


def only(*names: str) -> Callable[[nn.Module], None]:
    def freeze(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(part in name for part in names))

    return freeze


def adapters(model: nn.Module) -> None:
    model.requires_grad_(False)
    blocks = model._modules["blocks"]
    assert isinstance(blocks, nn.ModuleList)
    with seeded(0):
        for index in (2, 3, 6):
            blocks[index] = Adapter(blocks[index], 32).double()
            blocks[index].block.requires_grad_(False)


PATTERNS = {
    "embedding": only("embedding"),
    "a norm of stage 2": only("blocks.5.mlp_norm"),
    "adapters": adapters,
    "the head": only("head"),
    "nothing": only("no such name"),
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("recompute", ["none", "block", "full"])
def test_partly_frozen_models_train_as_in_one_process(pattern: str, recompute: str) -> None:
    model = gpt(tied=False)
    PATTERNS[pattern](model)
    schedule, chunks = SCHEDULES[len(pattern) % 3]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    steps = [tokens(4, seed=step) for step in range(2)]
    options: dict[str, Any] = {"schedule": schedule, "chunks": chunks, "microbatches": 4, "recompute": recompute}
    optimizer = ADAMW if pattern != "nothing" else None
    mine = run_pipeline(model, token_loss, [[step] for step in steps], 4, optimizer=optimizer, **options)
    if pattern == "nothing":
        with torch.no_grad():
            assert mine.results[0].loss == pytest.approx(float(token_loss(model(steps[0][0]), steps[0][1])), rel=1e-12)
    else:
        plain = run_plain(model, token_loss, [[parts(step, 4)] for step in steps], optimizer=optimizer)
        assert_same(mine, plain, 0)
    assert all(torch.equal(mine.weights[name], before[name]) for name in frozen)
    assert all(mine.gradients[name] is None for name in frozen)


def test_no_gradient_goes_below_the_first_trainable_stage_also_when_that_changes_between_steps() -> None:
    model = gpt(tied=False, layers=6)
    copies = [copy.deepcopy(model) for _ in range(4)]

    def rank(transport: Any) -> list[int]:
        pipe = Pipeline(copies[transport.rank], token_loss, Mesh.local(pp=4), microbatches=2, cuts=[2, 2, 2, 3])
        sent = []
        pipe.step(tokens(2))  # sizes travel
        for first in (0, 2, 1):
            for stage, module in pipe.modules.items():
                module.requires_grad_(stage >= first)
            pipe.step(tokens(2))
            before = pipe.mesh.pp_group.counters.messages["send"]  # type: ignore[attr-defined]
            pipe.step(tokens(2))
            sent.append(pipe.mesh.pp_group.counters.messages["send"] - before)  # type: ignore[attr-defined]
        return sent

    # forward messages go from ranks 0, 1, 2; gradients from ranks above the first trainable stage
    assert run_ranks(4, rank) == [[2, 2, 2], [4, 2, 2], [4, 2, 4], [2, 2, 2]]
