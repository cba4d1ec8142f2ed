"""The norm covers the whole model once, and clipping is one decision."""

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
from pipert.errors import ConfigError
from tests.engine.world import gpt, token_loss, tokens, tower, vectors


def on_ranks(model: nn.Module, pp: int, dp: int, act: Any, **options: Any) -> list[Any]:
    copies = [copy.deepcopy(model) for _ in range(pp * dp)]
    return run_ranks(
        pp * dp,
        lambda t: act(Pipeline(copies[t.rank], F.mse_loss, Mesh.local(pp=pp, dp=dp), **options)),
    )


def test_stage_norms_of_3_and_4_make_5_and_clipping_at_1_multiplies_all_by_a_fifth() -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()

    def act(pipe: Pipeline) -> tuple[float, float]:
        (parameter,) = pipe.parameters()
        parameter.grad = torch.full_like(parameter, 3.0 + pipe.mesh.pp_rank)
        return pipe.clip_grad_norm_(1.0), float(parameter.grad)

    assert on_ranks(model, 2, 1, act) == [(5.0, pytest.approx(0.6)), (5.0, pytest.approx(0.8))]


@pytest.mark.parametrize(("pp", "dp"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_a_tied_embedding_is_counted_once(pp: int, dp: int) -> None:
    model = gpt(tied=True)

    def act(pipe: Pipeline) -> float:
        for name, parameter in pipe.named_parameters():
            if name == "embedding.weight":
                parameter.grad = torch.full_like(parameter, math.sqrt(800 / parameter.numel()))
        return pipe.grad_norm()

    norms = on_ranks(model, pp, dp, act)
    assert norms == [norms[0]] * (pp * dp)
    assert norms[0] == pytest.approx(28.284271, abs=1e-6)


def test_the_norm_is_bitwise_the_same_in_every_layout_and_that_of_torch() -> None:
    model, batch = gpt(tied=False), tokens(4)

    def act(transport: Any, pp: int) -> tuple[float, float, dict[str, torch.Tensor]]:
        pipe = Pipeline(copy.deepcopy(model), token_loss, Mesh.local(pp=pp), microbatches=2)
        pipe.step(batch)
        norm = pipe.clip_grad_norm_(0.01)
        return norm, pipe.grad_norm(), {n: p.grad for n, p in pipe.named_parameters() if p.grad is not None}

    outcomes = [run_ranks(pp, lambda t, pp=pp: act(t, pp)) for pp in (1, 2, 4)]  # type: ignore[misc]
    assert len({outcome[0] for ranks in outcomes for outcome in ranks}) == 1
    plain = copy.deepcopy(model)
    for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
        (token_loss(plain(x), y) * 0.5).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    assert outcomes[0][0][0] == pytest.approx(float(norm), rel=1e-12)
    assert outcomes[0][0][1] == pytest.approx(0.01, rel=1e-3)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(outcomes[0][0][2][name], parameter.grad, rtol=1e-10, atol=1e-12)


def test_frozen_and_unused_parameters_have_no_part_in_the_norm() -> None:
    model = tower(4)

    def act(pipe: Pipeline) -> float:
        first = next(iter(pipe.parameters()))
        first.grad = torch.ones_like(first)
        return pipe.grad_norm()

    norms = on_ranks(model, 2, 1, act)
    assert norms[0] == norms[1] == pytest.approx(math.sqrt(36 + 6))  # a Linear(6, 6) and a LayerNorm's weight


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_shows_on_every_rank(bad: float) -> None:
    def act(pipe: Pipeline) -> float:
        if pipe.mesh.pp_rank == 1:
            parameter = next(iter(pipe.parameters()))
            parameter.grad = torch.full_like(parameter, bad)
        return pipe.grad_norm()

    assert all(not math.isfinite(norm) for norm in on_ranks(tower(4), 2, 1, act))


def test_clipping_at_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_norm = 0 must be a positive number"):
        on_ranks(tower(4), 2, 1, lambda pipe: pipe.clip_grad_norm_(0))


def test_pipelines_of_one_process_do_not_disturb_each_other() -> None:
    models = [tower(4), tower(4, seed=1)]

    def rank(transport: Any) -> list[float]:
        mesh = Mesh.local(pp=2)
        pipes = [Pipeline(copy.deepcopy(m), F.mse_loss, mesh, microbatches=2) for m in models]
        return [pipe.step(vectors(4)).loss for _ in range(2) for pipe in pipes]

    def alone(transport: Any, model: nn.Module) -> float:
        return Pipeline(copy.deepcopy(model), F.mse_loss, Mesh.local(pp=2), microbatches=2).step(vectors(4)).loss

    apart = [run_ranks(2, lambda t, m=m: alone(t, m))[0] for m in models]  # type: ignore[misc]
    assert run_ranks(2, rank) == [apart * 2] * 2
