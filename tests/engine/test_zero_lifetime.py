"""Optimizers of a pipeline that are closed, replaced, loaded, and whose weights somebody else moves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pipert
from pipert.comm.local import run_ranks
from pipert.comm.mesh import Mesh
from pipert.engine.pipeline import Pipeline
from pipert.errors import ConfigError
from tests.engine.world import tower, vectors


def on_two_replicas(work: Callable[[Pipeline, int], None]) -> None:
    copies = [tower(2) for _ in range(2)]
    run_ranks(2, lambda t: work(Pipeline(copies[t.rank], F.mse_loss, Mesh.local(dp=2), microbatches=1), t.rank))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_closed_optimizer_leaves_gradients_whole_and_the_next_one_alone(zero: int) -> None:
    def work(pipe: Pipeline, _: int) -> None:
        first = pipert.ZeroAdamW(pipe, zero=zero)
        pipe.step(vectors(2))
        gradients = first.gradients()
        first.close()
        for name, parameter in pipe.named_parameters():
            gradient = gradients[name]
            assert parameter.grad is not None
            assert gradient is not None
            assert torch.equal(parameter.grad, gradient)
        second = pipert.ZeroAdamW(pipe, zero=1)
        first.close()
        before = [parameter.detach().clone() for parameter in pipe.parameters()]
        second.step()
        assert not any(map(torch.equal, before, pipe.parameters()))
        with pytest.raises(ConfigError, match="the optimizer is closed"):
            first.step()

    on_two_replicas(work)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_weights_that_were_moved_behind_an_optimizer_s_back_are_refused(zero: int) -> None:
    def work(pipe: Pipeline, _: int) -> None:
        optim = pipert.ZeroAdamW(pipe, zero=zero)
        pipe.step(vectors(2))
        name, parameter = next(pipe.named_parameters())
        parameter.data = parameter.data.clone()  # what model.to(...) does
        with pytest.raises(ConfigError, match=f"{name} is no longer where its optimizer updates it"):
            optim.step()

    on_two_replicas(work)


def test_weights_in_shards_are_refused_by_a_second_pipeline_and_optimizer() -> None:
    copies = [tower(2) for _ in range(2)]

    def rank(transport: Any) -> None:
        mesh, model = Mesh.local(dp=2), copies[transport.rank]
        one, other = (Pipeline(model, F.mse_loss, mesh, microbatches=1) for _ in range(2))
        pipert.ZeroAdamW(one, zero=3)
        with pytest.raises(ConfigError, match="in shards of another optimizer"):
            pipert.ZeroAdamW(other)
        with pytest.raises(ConfigError, match="of another pipeline"):
            Pipeline(model, F.mse_loss, mesh, microbatches=1)

    run_ranks(2, rank)


def test_replicas_that_give_other_hyper_parameters_are_refused() -> None:
    def work(pipe: Pipeline, rank: int) -> None:
        with pytest.raises(ConfigError, match="ranks 0 and 1 made different optimizers"):
            pipert.ZeroAdamW(pipe, lr=0.1 * (1 + rank), zero=1)

    on_two_replicas(work)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda state: state["state"]["0.0.weight"].pop("exp_avg"), "has no exp_avg"),
        (lambda state: state["state"]["0.0.weight"].update(exp_avg=torch.zeros(3)), r"has shape \[3\]"),
        (lambda state: state.pop("state"), "a state without state"),
        (lambda state: state["state"].update({0: {}}), "a state by number"),
    ],
)
def test_a_state_that_cannot_be_loaded_is_refused_on_every_rank_and_changes_nothing(spoil: Any, words: str) -> None:
    def work(pipe: Pipeline, rank: int) -> None:
        optim = pipert.ZeroAdamW(pipe, zero=2)
        pipe.step(vectors(2))
        optim.step()
        kept = optim.state_dict()
        spoilt = copy.deepcopy(kept)
        if rank == 1:
            spoil(spoilt)
        with pytest.raises(ConfigError, match=words):
            optim.load_state_dict(spoilt)
        again = optim.state_dict()["state"]
        assert all(torch.equal(again[name]["exp_avg"], one["exp_avg"]) for name, one in kept["state"].items())

    on_two_replicas(work)


class Scale(nn.Module):
    """``a x`` with a single number ``a``."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a * x


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("make", [torch.optim.Adam, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
def test_the_state_of_a_parameter_without_dimensions_is_loaded_by_a_wrapped_optimizer(make: Any, dp: int) -> None:
    def rank(_: object) -> None:
        pipe = Pipeline(nn.Sequential(Scale()), F.mse_loss, Mesh.local(dp=dp), microbatches=1)
        optim = pipert.ZeroOptimizer(pipe, make, zero=1)
        for _ in range(2):
            pipe.step(vectors(2))
            optim.step()
            optim.load_state_dict(optim.state_dict())

    run_ranks(dp, rank)
