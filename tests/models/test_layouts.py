"""The layout of a GPT is invisible: in its initial weights, its dropout masks, its losses and its gradients."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipert.comm.local import run_ranks
from pipert.comm.mesh import Mesh
from pipert.engine.pipeline import Pipeline
from pipert.engine.reference import reference_step
from pipert.models import GPT, CausalLMLoss, GPTConfig

CASES: dict[str, Any] = {"layers": 8, "hidden": 32, "heads": 4, "sequence": 16, "vocabulary": 61}
LAYOUTS = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (4, 2, 1), (2, 1, 2), (1, 1, 4)]

Tensors = dict[str, torch.Tensor]


def batch(samples: int, seed: int = 0, config: GPTConfig | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    config = config or GPTConfig(**CASES)
    ids = torch.randint(
        config.vocabulary, (samples, config.sequence + 1), generator=torch.Generator().manual_seed(seed)
    )
    return ids[:, :-1], ids[:, 1:]


def gradients(
    config: GPTConfig, pp: int, chunks: int, dp: int, *, samples: int = 8, microbatches: int = 4, **options: Any
) -> tuple[float, Tensors, list[Tensors]]:
    """Loss, gradients by name, and each rank's initial weights, of one step on threads from a model on meta."""
    inputs, targets = batch(samples, config=config)
    options.setdefault("schedule", "interleaved" if chunks > 1 else "1f1b")

    def rank(_: object) -> tuple[float, Tensors, Tensors]:
        mesh = Mesh.local(pp=pp, dp=dp)
        share = slice(mesh.dp_rank * samples // dp, (mesh.dp_rank + 1) * samples // dp)
        pipe = Pipeline(
            GPT(config, dtype=torch.float64),
            CausalLMLoss(),
            mesh,
            chunks=chunks,
            microbatches=microbatches // dp,
            seed=7,
            **options,
        )
        weights = {name: parameter.detach().clone() for name, parameter in pipe.named_parameters()}
        loss = pipe.step((inputs[share], targets[share])).loss
        return loss, {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}, weights

    outcomes = run_ranks(pp * dp, rank, deadline=60)
    merged = {name: gradient for _, part, _ in outcomes for name, gradient in part.items()}
    return outcomes[0][0], merged, [weights for _, _, weights in outcomes]


def alone(config: GPTConfig, samples: int = 8, microbatches: int = 4) -> tuple[float, Tensors]:
    """The same in one process."""
    model = GPT(config, "cpu", seed=7, dtype=torch.float64)
    loss = reference_step(model, CausalLMLoss(), batch(samples, config=config), microbatches, seed=7).loss
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def sha(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


@pytest.mark.parametrize(("pp", "chunks", "dp"), LAYOUTS)
def test_initial_weights_have_the_same_hashes_and_no_rank_has_them_all(pp: int, chunks: int, dp: int) -> None:
    whole = {name: sha(p.detach()) for name, p in GPT(GPTConfig(**CASES), "cpu", 7, torch.float64).named_parameters()}
    _, _, ranks = gradients(GPTConfig(**CASES), pp, chunks, dp)
    held = [{name: sha(weight) for name, weight in weights.items()} for weights in ranks]
    assert {name: value for weights in held for name, value in weights.items()} == whole
    for weights in held:
        assert weights.items() <= whole.items()
        assert pp == 1 or len(weights) < 0.8 * len(whole)
    assert whole["blocks.0.mlp.up.weight"] != whole["blocks.4.mlp.up.weight"]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("recompute", ["none", "block", "full"])
def test_dropout_gives_bitwise_the_same_gradients_in_every_schedule_and_recompute(
    schedule: str, recompute: str
) -> None:
    config = GPTConfig(**CASES, dropout=0.5, tied=False)
    loss, expected = alone(config)
    chunks = 2 if schedule == "interleaved" else 1
    got_loss, got, _ = gradients(config, 4, chunks, 1, schedule=schedule, recompute=recompute)
    assert got_loss == loss
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        assert torch.equal(gradient, expected[name]), name


def test_dropout_is_different_from_step_to_step_and_seed_to_seed() -> None:
    config = GPTConfig(**CASES, dropout=0.5)
    model = GPT(config, "cpu", 7)
    losses = {
        reference_step(model, CausalLMLoss(), batch(4), 2, seed=seed, step=step).loss
        for seed in (0, 1)
        for step in (0, 1)
    }
    assert len(losses) == 4


@settings(max_examples=25)
@given(data=st.data())
def test_any_model_in_any_layout_has_the_gradients_of_one_process(data: st.DataObject) -> None:
    def one_of(*choices: Any) -> Any:
        return data.draw(st.sampled_from(choices))

    config = GPTConfig(
        layers=4,
        hidden=16,
        heads=4,
        sequence=data.draw(st.integers(1, 9)),
        vocabulary=61,
        kv_heads=one_of(None, 1, 2),
        positions=one_of("learned", "rotary"),
        norm=one_of("layernorm", "rmsnorm"),
        activation=one_of("gelu", "swiglu"),
        bias=one_of(True, False),
        tied=one_of(True, False),
        dropout=one_of(0.0, 0.5),
    )
    pp, chunks, dp = one_of((2, 1, 1), (4, 1, 1), (3, 1, 1), (2, 2, 1), (2, 1, 2), (1, 1, 2))
    microbatches = dp * data.draw(st.integers(1, 4))
    loss, expected = alone(config, microbatches=microbatches)
    got_loss, got, _ = gradients(
        config, pp, chunks, dp, microbatches=microbatches, recompute=one_of("none", "block", "full")
    )
    assert got_loss == pytest.approx(loss, rel=1e-10)
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-10, msg=name)
