"""One decision for all ranks, and early steps: right, or restored to the bit and done again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import pipert
from pipert.comm.local import run_ranks
from pipert.comm.mesh import Mesh
from pipert.engine.pipeline import Pipeline
from pipert.optim.loss_scale import LossScale
from tests.engine.world import assert_same, parts, tower, vectors
from tests.engine.zero_world import state_of, train

LION_LIKE = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)  # noqa: E731


@given(
    zero=st.integers(0, 3),
    layout=st.sampled_from([(1, 2, "interleaved", 3), (2, 2, "1f1b", 1), (2, 1, "zb-h1", 1), (2, 2, "zb-v", 0)]),
    clip=st.sampled_from([None, 0.05, 0.6, 1e3]),
    factory=st.sampled_from([None, LION_LIKE]),
    tied=st.booleans(),
    poisoned=st.sampled_from([None, 1, 2]),
    again=st.booleans(),
)
@settings(max_examples=15)
def test_an_early_step_has_the_bits_of_a_late_one(
    zero: int,
    layout: tuple[int, int, str, int],
    clip: float | None,
    factory: Any,
    tied: bool,
    poisoned: int | None,
    again: bool,
) -> None:
    """Also where some steps are clipped and some are not, one has a NaN, the rate changes, and after evaluations."""
    pp, dp, schedule, chunks = layout
    model = tower(6)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if tied:
        linears[-1].weight = linears[0].weight
    steps = [[vectors(5, seed=10 * s + r) for r in range(dp)] for s in range(4)]
    if poisoned is not None:
        steps[poisoned][0][0][0, 0] = float("nan")

    def before(pipe: Pipeline, optim: Any, number: int) -> None:
        if again and number == 2:
            pipe.eval_step(vectors(2))
        if again and number == 3:
            for group in optim.param_groups:
                group["lr"] = 0.003

    def run(early: bool) -> Any:
        options = {"zero": zero, "early": early, "clip": clip}

        def make(pipe: Pipeline) -> Any:
            if factory is None:
                return pipert.ZeroAdamW(pipe, lr=0.01, **options)
            return pipert.ZeroOptimizer(pipe, factory, **options)

        return train(
            model, F.mse_loss, steps, pp, dp, make, before=before, schedule=schedule, microbatches=3,
            **({"chunks": chunks} if chunks else {}),
        )  # fmt: skip

    late, early = run(early=False), run(early=True)
    assert_same(early, late, 0)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("where", ["every replica", "one replica"])
def test_all_ranks_skip_a_step_with_a_gradient_that_is_not_finite(
    zero: int, early: bool, value: float, where: str
) -> None:
    """In stage 1 of 4; weights, moments, steps and learning rate keep their bits, the next step is a usual one."""
    copies = [tower(4) for _ in range(8)]
    batches = [vectors(4, seed=s) for s in range(3)]

    def rank(transport: Any) -> tuple[bool, float, dict[str, torch.Tensor]]:
        mesh = Mesh.local(pp=4, dp=2)
        scale = LossScale(initial=1024.0, interval=2)
        pipe = Pipeline(copies[transport.rank], F.mse_loss, mesh, microbatches=2, loss_scale=scale)
        optim = pipert.ZeroAdamW(pipe, lr=0.01, zero=zero, early=early)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optim, lambda updates: 1.0 / (1 + updates))
        pipe.step(batches[0])
        optim.step()
        scheduler.step()
        optim.zero_grad()
        before, rate = state_of(pipe, optim), optim.param_groups[0]["lr"]
        spoilt = _spoil(pipe, value) if where == "every replica" or mesh.dp_rank == 1 else (lambda: None)
        pipe.step(batches[1])
        spoilt()
        optim.step()
        assert optim.decision is not None
        assert not optim.decision.apply
        after = state_of(pipe, optim)
        assert after.keys() == before.keys()
        for name, tensor in before.items():
            assert torch.equal(tensor, after[name]), name
        assert optim.param_groups[0]["lr"] == rate
        assert (pipe.loss_scale.scale, pipe.loss_scale.skipped) == (512.0, 1)
        optim.zero_grad()
        pipe.step(batches[2])
        optim.step()
        assert optim.decision.apply
        assert any(not torch.equal(tensor, before[name]) for name, tensor in state_of(pipe, optim).items())
        return optim.decision.apply, optim.decision.norm, state_of(pipe, optim)

    found = run_ranks(8, rank)
    assert len({norm for _, norm, _ in found}) == 1
    plain = tower(4)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for batch, rate in ((batches[0], 0.01), (batches[2], 0.005)):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        F.mse_loss(plain(batch[0]), batch[1]).backward()
        optimizer.step()
    weights = {name: weight for _, _, state in found for name, weight in state.items()}
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-10, atol=1e-12)


def _spoil(pipe: Pipeline, value: float) -> Callable[[], None]:
    """Put a value into one gradient of stage 1, as a backward in half precision would."""
    hooks = [
        next(module.parameters()).register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([0]), value))
        for stage, module in pipe.modules.items()
        if stage == 1
    ]
    return lambda: [hook.remove() for hook in hooks]  # type: ignore[return-value]


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("early", [False, True])
def test_a_trainer_may_ask_for_the_decision_first(zero: int, early: bool) -> None:
    """`pipe.decide`, then `optim.step` where that says so: the same as `clip`."""
    model, steps = tower(4), [[vectors(4, seed=10 * s + r) for r in range(2)] for s in range(3)]

    def run(clip: float | None, ask: float | None) -> Any:
        def before(pipe: Pipeline, optim: Any, number: int) -> None:
            if ask is not None:
                assert pipe.decide(ask).apply
                assert pipe.loss_scale.good == number + 1

        make = lambda pipe: pipert.ZeroAdamW(pipe, lr=0.01, zero=zero, early=early, clip=clip)  # noqa: E731
        return train(model, F.mse_loss, steps, 2, 2, make, before=before, microbatches=2)

    assert_same(run(None, 0.1), run(0.1, None), 0)


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_an_early_update_that_nobody_asked_for_does_not_count(zero: int) -> None:
    """Without `step` between them, two steps of the pipeline add up their gradients at the same weights."""
    copies = [tower(4) for _ in range(2)]
    first, second = vectors(4, seed=1), vectors(4, seed=2)

    def rank(transport: Any) -> None:
        pipe = Pipeline(copies[transport.rank], F.mse_loss, Mesh.local(dp=2), "interleaved", 2, chunks=4)
        optim = pipert.ZeroAdamW(pipe, lr=0.01, zero=zero, early=True)
        before = state_of(pipe, optim)
        loss = pipe.step(first).loss
        optim.zero_grad()
        assert pipe.eval_step(first).loss == pytest.approx(loss, rel=1e-12)
        assert all(torch.equal(tensor, before[name]) for name, tensor in state_of(pipe, optim).items())
        pipe.step(second)
        optim.step()
        assert not all(
            torch.equal(tensor, before[name]) for name, tensor in state_of(pipe, optim).items() if name in before
        )

    run_ranks(2, rank)


def test_a_batch_in_which_nothing_counts_still_decays_weights_as_torch_does() -> None:
    ignored = (torch.randn(2, 6, dtype=torch.float64), torch.full((2,), -100))
    for early in (False, True):
        for zero in range(4):
            copies = [nn.Sequential(nn.Linear(6, 3)).double() for _ in range(2)]
            plain = copy.deepcopy(copies[0])
            optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
            for parameter in plain.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()

            def rank(transport: Any, zero: int = zero, early: bool = early, copies: Any = copies) -> Any:
                pipe = Pipeline(copies[transport.rank], F.cross_entropy, Mesh.local(dp=2), microbatches=2)
                optim = pipert.ZeroAdamW(pipe, lr=0.1, zero=zero, early=early)
                pipe.step(ignored)
                optim.step()
                with optim.gathered():
                    return {name: p.detach().clone() for name, p in pipe.named_parameters()}

            with pytest.warns(UserWarning, match="loss counts nothing"):
                found = run_ranks(2, rank)
            for name, parameter in plain.named_parameters():
                torch.testing.assert_close(found[0][name], parameter.detach(), rtol=1e-12, atol=1e-14)


def test_parts_of_a_step_appear_in_its_timeline() -> None:
    copies = [tower(4) for _ in range(2)]

    def rank(transport: Any) -> set[str]:
        pipe = Pipeline(copies[transport.rank], F.mse_loss, Mesh.local(dp=2), "interleaved", 2, chunks=4)
        optim = pipert.ZeroAdamW(pipe, zero=3, early=True)
        pipe.step(parts(vectors(4), 2))
        optim.step()
        return {action.kind.name for _, action, _, _ in pipe.timeline()}

    assert run_ranks(2, rank)[0] == {"F", "B", "GATHER", "FREE", "SCATTER", "STEP"}
