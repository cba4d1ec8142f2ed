"""ZeRO together with tensor parallelism."""

from __future__ import annotations

import pytest
import torch

import pipert
from pipert.comm.local import run_ranks
from pipert.comm.mesh import Mesh
from pipert.engine.pipeline import Pipeline
from pipert.errors import ConfigError
from pipert.gpt_config import GPTConfig
from pipert.layers.parallelize import parallelize
from pipert.models.gpt import GPT
from pipert.models.loss import CausalLMLoss
from tests.engine.world import ADAMW, gpt
from tests.models.layouts import SEED, alone, batches

CONFIG = GPTConfig(layers=4, hidden=32, heads=4, kv_heads=1, sequence=16, vocabulary=61)


@pytest.mark.parametrize(
    ("pp", "dp", "zero", "early"), [(1, 2, 1, False), (1, 2, 2, True), (2, 2, 3, False), (2, 1, 0, True)]
)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_shards_of_shards_give_the_losses_and_norms_of_one_process(
    pp: int, dp: int, zero: int, early: bool, sequence_parallel: bool
) -> None:
    """Later losses and norms depend on every weight before; rows that several ranks hold count once."""
    steps = batches(CONFIG, 3, 8)
    wanted = alone(CONFIG, steps, 4, optimizer=ADAMW)

    def rank(_: object) -> list[tuple[float, float]]:
        mesh = Mesh.local(pp=pp, dp=dp, tp=2)
        model = parallelize(
            GPT(CONFIG, "meta", seed=SEED, dtype=torch.float64), mesh, sequence_parallel=sequence_parallel
        )
        pipe = Pipeline(model, CausalLMLoss(), mesh, microbatches=4 // dp, seed=SEED)
        optim = pipert.ZeroAdamW(pipe, lr=0.01, zero=zero, early=early)
        found = []
        for inputs, targets in steps:
            optim.zero_grad()
            share = slice(mesh.dp_rank * len(inputs) // dp, (mesh.dp_rank + 1) * len(inputs) // dp)
            found.append((pipe.step((inputs[share], targets[share])).loss, pipe.grad_norm()))
            optim.step()
        return found

    for found in run_ranks(2 * pp * dp, rank, deadline=60):
        for (loss, norm), alone_loss, alone_norm in zip(found, wanted.losses, wanted.norms, strict=True):
            assert loss == pytest.approx(alone_loss, rel=1e-9)
            assert norm == pytest.approx(alone_norm, rel=1e-8)


def test_stages_that_do_not_go_with_a_spread_vocabulary_are_refused_before_anything_is_sent() -> None:
    copies = [gpt(layers=2) for _ in range(2)]

    def rank(_: object) -> None:
        mesh = Mesh.local(dp=2)
        pipe = Pipeline(copies[mesh.rank], CausalLMLoss(), mesh, microbatches=1, vocabulary="spread")
        with pytest.raises(ConfigError, match="zero = 2 does not go with vocabulary"):
            pipert.ZeroAdamW(pipe, zero=2)

    run_ranks(2, rank)
