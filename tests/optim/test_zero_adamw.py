"""pipert's AdamW and wrapped torch optimizers against torch, on one rank; states that go from layout to layout."""

from __future__ import annotations

import copy
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


class Sizes(nn.Module):
    """Parameters of many sizes; the last one is used now and then."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        make = lambda n: nn.Parameter(torch.randn(n, generator=generator).to(dtype))  # noqa: E731
        self.one, self.seven, self.many, self.rare = make(1), make(7), make(1025), make(9)
        self.use = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = (self.one * 2).sin().sum() + (self.seven**2).sum() + (self.many * torch.linspace(0, 1, 1025)).sum()
        return x * (total + (self.rare**3).sum() if self.use else total)


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("wrapped", [False, True])
def test_adamw_makes_torch_s_updates(dp: int, zero: int, wrapped: bool) -> None:
    """50 steps, groups that decay, that do not, and an empty one; a parameter without gradient on odd steps."""
    models = [nn.Sequential(Sizes(torch.float32)) for _ in range(dp + 1)]

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        named = dict(model.named_parameters())
        decays = [named[name] for name in ("0.many", "0.rare")]
        return [
            {"params": decays, "weight_decay": 0.1},
            {"params": [named["0.one"], named["0.seven"]], "weight_decay": 0.0},
            {"params": []},
        ]

    def settings(optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 20:
            for group in optimizer.param_groups:
                group["lr"], group["betas"] = 0.003, (0.8, 0.99)

    batch = torch.tensor([[0.5]]), torch.tensor([[1.0]])
    reference = models[dp]
    plain = torch.optim.AdamW(groups(reference), lr=0.01)
    for step in range(50):
        reference[0].use = step % 2 == 0
        settings(plain, step)
        plain.zero_grad()
        F.mse_loss(reference(batch[0]), batch[1]).backward()
        plain.step()

    def rank(transport: Any) -> dict[str, torch.Tensor]:
        model = models[transport.rank]
        pipe = Pipeline(model, F.mse_loss, Mesh.local(dp=dp), microbatches=1)
        if wrapped:
            optim = pipert.ZeroOptimizer(pipe, lambda g: torch.optim.AdamW(g, lr=0.01), groups(model), zero=zero)
        else:
            optim = pipert.ZeroAdamW(pipe, groups(model), lr=0.01, zero=zero)
        for step in range(50):
            model[0].use = step % 2 == 0
            settings(optim, step)
            optim.zero_grad()
            pipe.step(batch)
            optim.step()
        assert {name: s["step"] for name, s in optim.state_dict()["state"].items()} == {
            "0.one": 50.0, "0.seven": 50.0, "0.many": 50.0, "0.rare": 25.0,
        }  # fmt: skip
        with optim.gathered():
            return {name: p.detach().clone() for name, p in pipe.named_parameters()}

    for found in run_ranks(dp, rank):
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-6, atol=1e-6)


def test_defaults_are_torch_s() -> None:
    pipe = Pipeline(nn.Sequential(nn.Linear(2, 2)), F.mse_loss, Mesh.local(), microbatches=1)
    ours = pipert.ZeroAdamW(pipe).param_groups[0]
    theirs = torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).param_groups[0]
    assert {key: ours[key] for key in ("lr", "betas", "eps", "weight_decay")} == {
        key: theirs[key] for key in ("lr", "betas", "eps", "weight_decay")
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_updates_of_half_precision_weights_add_up_in_their_masters(dtype: torch.dtype) -> None:
    copies = [nn.Sequential(nn.Linear(8, 1, bias=False)).to(dtype) for _ in range(2)]
    for model in copies:
        nn.init.ones_(model[0].weight)

    def rank(transport: Any) -> torch.Tensor:
        pipe = Pipeline(copies[transport.rank], F.mse_loss, Mesh.local(dp=2), microbatches=1)
        optim = pipert.ZeroAdamW(pipe, lr=1e-4, weight_decay=0.0, zero=2)
        for _ in range(100):
            optim.zero_grad()
            pipe.step((torch.ones(1, 8, dtype=dtype), torch.zeros(1, 1, dtype=dtype)))
            optim.step()
        master = optim.state_dict()["state"]["0.weight"]["master"]
        assert master.dtype == torch.float32
        assert torch.equal(next(pipe.parameters()).detach(), master.to(dtype))
        return master

    for master in run_ranks(2, rank):
        torch.testing.assert_close(master, torch.full((1, 8), 0.99), rtol=1e-3, atol=0)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_state_goes_on_in_any_layout(wrapped: bool) -> None:
    """Saved with stage 3 over 3 replicas, loaded with stage 1 over 2: moments are bitwise the same, and go on alike."""
    start = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    batches = [(torch.randn(6, 3).double(), torch.randn(6, 2).double()) for _ in range(4)]

    def make(pipe: Pipeline, zero: int) -> Any:
        if wrapped:
            return pipert.ZeroOptimizer(pipe, lambda g: torch.optim.Adam(g, lr=0.01), zero=zero)
        return pipert.ZeroAdamW(pipe, lr=0.02, zero=zero)

    def run(dp: int, zero: int, batches: Any, weights: Any = None, state: Any = None) -> Any:
        copies = [copy.deepcopy(start) for _ in range(dp)]
        for model in copies:
            if weights is not None:
                model.load_state_dict(weights)

        def rank(transport: Any) -> Any:
            pipe = Pipeline(copies[transport.rank], F.mse_loss, Mesh.local(dp=dp), microbatches=1)
            optim = make(pipe, zero)
            if state is not None:
                optim.load_state_dict(state)
            for batch in batches:
                optim.zero_grad()
                pipe.step((batch[0].tensor_split(dp)[transport.rank], batch[1].tensor_split(dp)[transport.rank]))
                optim.step()
            with optim.gathered():
                weights = {name: p.detach().clone() for name, p in pipe.named_parameters()}
            return weights, copy.deepcopy(optim.state_dict())

        return run_ranks(dp, rank)[0]

    weights, state = run(3, 3, batches[:2])
    assert state["param_groups"][0]["params"] == list(weights)
    _, again = run(2, 1, [], weights, state)
    for name, kept in state["state"].items():
        for key, value in kept.items():
            assert torch.equal(torch.as_tensor(again["state"][name][key]), torch.as_tensor(value)), (name, key)
    resumed, _ = run(2, 1, batches[2:], weights, state)
    whole, _ = run(1, 0, batches)
    for name, weight in whole.items():
        torch.testing.assert_close(resumed[name], weight, rtol=1e-10, atol=1e-12)


def test_a_state_of_another_model_is_refused() -> None:
    pipe = Pipeline(nn.Sequential(nn.Linear(2, 2)), F.mse_loss, Mesh.local(), microbatches=1)
    optim = pipert.ZeroAdamW(pipe)
    state = {"0.weight": {"step": 1.0, "exp_avg": torch.zeros(3, 3), "exp_avg_sq": torch.zeros(3, 3)}}
    groups = optim.state_dict()["param_groups"]
    with pytest.raises(ConfigError, match=r"exp_avg of 0.weight has shape \[3, 3\], the parameter \[2, 2\]"):
        optim.load_state_dict({"state": state, "param_groups": groups})
    with pytest.raises(ConfigError, match="a state of 2 parameter groups for 1"):
        optim.load_state_dict({"state": {}, "param_groups": groups * 2})
