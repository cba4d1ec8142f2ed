"""ZeRO: whatever is shared out among replicas, the numbers are those of one process."""

from __future__ import annotations

import copy
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
from pipert.errors import ConfigError
from tests.engine.world import (
    ADAMW,
    Outcome,
    assert_same,
    gpt,
    parts,
    run_plain,
    tie_and_freeze,
    token_loss,
    tokens,
    tower,
    vectors,
)
from tests.engine.zero_world import train

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 0)]
FACTORIES: dict[str, Any] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "lion": lambda p: Lion(p, lr=0.01),
}


class Lion(torch.optim.Optimizer):
    """The sign of a running mean (Chen et al. 2023), as somebody would write it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    p.add_((0.9 * mean + 0.1 * p.grad).sign(), alpha=-group["lr"])
                    mean.lerp_(p.grad, 0.01)


def adamw(**options: Any) -> Any:
    return lambda pipe: pipert.ZeroAdamW(pipe, lr=0.01, **options)


@st.composite
def worlds(draw: st.DrawFn) -> dict[str, Any]:
    schedule, chunks = draw(st.sampled_from(SCHEDULES))
    pp, dp = draw(st.sampled_from([(1, 2), (2, 2), (1, 3), (2, 1), (3, 2), (1, 4)]))
    stages = pp * (chunks or 2)
    even = draw(st.booleans())
    count = draw(st.integers(1, 4))
    size = st.integers(1, 3)
    sizes = st.lists(size, min_size=count, max_size=count) if even else st.lists(size, min_size=1, max_size=4)
    return {
        "pp": pp,
        "dp": dp,
        "options": {"schedule": schedule, **({"chunks": chunks} if chunks else {})},
        "recompute": draw(st.sampled_from(["none", "block", "full"])),
        "blocks": draw(st.integers(stages, stages + 3)),
        "sizes": [[draw(sizes) for _ in range(dp)] for _ in range(draw(st.integers(1, 3)))],
        "tied": draw(st.sets(st.integers(0, 5), max_size=3)),
        "frozen": draw(st.sets(st.integers(0, stages + 2), max_size=3)),
        "zero": draw(st.integers(0, 3)),
        "early": draw(st.booleans()),
        "clip": draw(st.sampled_from([None, 0.05, 1e3])),
        "factory": draw(st.sampled_from([None, *FACTORIES])),
    }


def clipped(factory: Any, clip: float | None) -> Any:
    """A torch optimizer that clips the norm of all gradients itself."""

    def make(parameters: Any) -> Any:
        own = list(parameters)
        optimizer = factory(own)
        step = optimizer.step

        def clip_and_step() -> None:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(own, clip)
            step()

        optimizer.step = clip_and_step
        return optimizer

    return make


@given(worlds())
@settings(max_examples=25)
def test_any_layout_and_stage_gives_the_numbers_of_one_process(world: dict[str, Any]) -> None:
    model = tower(world["blocks"], width=5)
    tie_and_freeze(model, world["tied"], world["frozen"])
    steps = [
        [[vectors(n, 5, seed=100 * s + 10 * r + m) for m, n in enumerate(own)] for r, own in enumerate(replicas)]
        for s, replicas in enumerate(world["sizes"])
    ]
    options = {key: world[key] for key in ("zero", "early", "clip")}
    factory = FACTORIES.get(world["factory"])

    def make(pipe: Pipeline) -> Any:
        return adamw(**options)(pipe) if factory is None else pipert.ZeroOptimizer(pipe, factory, **options)

    mine = train(
        model, F.mse_loss, steps, world["pp"], world["dp"], make, recompute=world["recompute"], **world["options"]
    )
    assert_same(mine, run_plain(model, F.mse_loss, steps, optimizer=clipped(factory or ADAMW, world["clip"])))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_gpt_with_tied_embeddings_trains_as_in_one_process(zero: int) -> None:
    model = gpt(layers=4, tied=True)
    steps = [[tokens(4, seed=10 * s + r) for r in range(2)] for s in range(3)]
    mine = train(
        model, token_loss, steps, 2, 2, adamw(zero=zero, clip=0.5), schedule="interleaved", chunks=2, microbatches=2
    )
    plain = [[parts(batch, 2) for batch in step] for step in steps]
    assert_same(mine, run_plain(model, token_loss, plain, optimizer=clipped(ADAMW, 0.5)))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("dp", "sizes"), [(4, [3]), (2, [8, 0, 24]), (2, [61]), (3, [1, 0, 2])])
def test_any_sizes_are_shared_out_and_moments_have_the_shapes_of_their_parameters(
    zero: int, dp: int, sizes: list[int]
) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList(nn.Parameter(torch.linspace(1, 2, n, dtype=torch.float64)) for n in sizes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * sum((part**2).sum() for part in self.parts)

    model = nn.Sequential(Odd())
    copies = [copy.deepcopy(model) for _ in range(dp)]
    steps = [[parts(vectors(2, 1, seed=10 * s + r), 2) for r in range(dp)] for s in range(3)]
    plain = run_plain(model, F.mse_loss, steps, optimizer=ADAMW)

    def rank(transport: Any) -> None:
        pipe = Pipeline(copies[transport.rank], F.mse_loss, Mesh.local(dp=dp), microbatches=2)
        optim = pipert.ZeroAdamW(pipe, lr=0.01, zero=zero)
        for step in steps:
            pipe.step(step[transport.rank])
            optim.step()
            optim.zero_grad()
        with optim.gathered():
            for name, parameter in pipe.named_parameters():
                torch.testing.assert_close(parameter.detach(), plain.weights[name], rtol=1e-10, atol=1e-12)
        state = optim.state_dict()["state"]
        for name, parameter in pipe.named_parameters():
            if parameter.numel():
                assert state[name]["exp_avg"].shape == state[name]["exp_avg_sq"].shape == parameter.shape
                assert state[name]["step"] == 3

    run_ranks(dp, rank)


class Weighted(nn.Module):
    """Its gradient is what the input says."""

    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.sum()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("place", [0, 1])
def test_every_copy_of_a_tied_weight_sees_the_sum_whatever_its_place(zero: int, place: int) -> None:
    """Four ranks find gradients 1, 2, 4 and 8; each replica counts for half."""

    class Tied(nn.Module):
        def __init__(self, tied: nn.Parameter, stage: int) -> None:
            super().__init__()
            own = nn.Parameter(torch.zeros(3, dtype=torch.float64))
            names = ["tied", "own"] if (stage + place) % 2 else ["own", "tied"]
            for name in names:
                self.register_parameter(name, tied if name == "tied" else own)
            self.stage = stage

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            factors = x[:, :1] if self.stage == 0 else x[:, 1:2]
            added = torch.cat([torch.zeros_like(x[:, :2]), factors * self.tied.sum() + 0 * self.own.sum()], 1)
            return x + torch.nn.functional.pad(added[:, 2:], (2, 0))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output[:, 2] - target[:, 0]).mean()

    def model() -> nn.Sequential:
        tied = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        return nn.Sequential(Tied(tied, 0), Tied(tied, 1))

    copies = [model() for _ in range(4)]

    def rank(transport: Any) -> tuple[float, torch.Tensor]:
        mesh = Mesh.local(pp=2, dp=2)
        pipe = Pipeline(copies[transport.rank], loss, mesh, microbatches=1)
        optim = pipert.ZeroOptimizer(pipe, lambda p: torch.optim.SGD(p, lr=1.0), zero=zero)
        factors = torch.tensor([[1.0, 4.0, 0.0]] if mesh.dp_rank == 0 else [[2.0, 8.0, 0.0]], dtype=torch.float64)
        pipe.step((factors, torch.zeros(1, 1, dtype=torch.float64)))
        gradient = next(g for name, g in optim.gradients().items() if "tied" in name)
        assert gradient is not None
        norm = pipe.grad_norm()
        assert norm == pytest.approx(7.5 * 5**0.5, rel=1e-12)  # counted once
        optim.step()
        with optim.gathered():
            weight = next(p.detach().clone() for name, p in pipe.named_parameters() if "tied" in name)
        assert torch.equal(gradient, torch.full((5,), 7.5, dtype=torch.float64))
        return norm, weight

    for norm, weight in run_ranks(4, rank):
        assert norm == pytest.approx(7.5 * 5**0.5)
        assert torch.equal(weight, torch.full((5,), -7.5, dtype=torch.float64))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("early", [False, True])
def test_gradients_that_were_there_are_added_to_and_several_steps_make_one_update(zero: int, early: bool) -> None:
    model = tower(4)
    batches = [[parts(vectors(4, seed=10 * s + r), 2) for r in range(2)] for s in range(3)]
    reference = copy.deepcopy(model)
    optimizer = ADAMW(reference.parameters())
    for parameter in reference.parameters():
        parameter.grad = torch.ones_like(parameter)
    for step in batches:
        for replica in step:
            for inputs, target in replica:
                (F.mse_loss(reference(inputs), target) * (len(inputs) / 8)).backward()
    optimizer.step()
    copies = [copy.deepcopy(model) for _ in range(4)]

    def rank(transport: Any) -> dict[str, torch.Tensor]:
        mesh = Mesh.local(pp=2, dp=2)
        pipe = Pipeline(copies[transport.rank], F.mse_loss, mesh, microbatches=2)
        optim = pipert.ZeroAdamW(pipe, lr=0.01, zero=zero, early=early)
        for parameter in pipe.parameters():
            parameter.grad = torch.ones(parameter.shape, dtype=parameter.dtype)
        for number, step in enumerate(batches):
            pipe.step(step[mesh.dp_rank])
            if number == 1:
                pipe.eval_step(step[mesh.dp_rank])  # computes with the weights before the update
        optim.step()
        with optim.gathered():
            return {name: p.detach().clone() for name, p in pipe.named_parameters()}

    wanted = dict(reference.named_parameters())
    for found in run_ranks(4, rank):
        for name, weight in found.items():
            torch.testing.assert_close(weight, wanted[name].detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_replicas_may_have_other_numbers_of_micro_batches_and_none_that_counts(zero: int) -> None:
    model = tower(4)
    steps = [[[vectors(2, seed=s + 10 * m) for m in range(1 + (r + s) % 3)] for r in range(2)] for s in range(3)]
    mine = train(model, F.mse_loss, steps, 1, 2, adamw(zero=zero), schedule="interleaved", chunks=4)
    assert_same(mine, run_plain(model, F.mse_loss, steps, optimizer=ADAMW))


def test_stages_of_zero_differ_in_nothing_but_rounding_of_micro_batches() -> None:
    """Stages 0 and 1 sum the same numbers in the same order; so do 2 and 3."""
    model, steps = tower(4), [[parts(vectors(4, seed=10 * s + r), 2) for r in range(2)] for s in range(2)]

    def run(zero: int) -> Outcome:
        make = lambda pipe: pipert.ZeroOptimizer(pipe, FACTORIES["sgd"], zero=zero)  # noqa: E731
        return train(model, F.mse_loss, steps, 2, 2, make)

    found = [run(zero) for zero in range(4)]
    assert_same(found[1], found[0], 0)
    assert_same(found[3], found[2], 0)


def test_parameters_at_stage_3_read_as_nan_until_they_are_gathered() -> None:
    copies = [tower(2) for _ in range(2)]

    def rank(transport: Any) -> None:
        pipe = Pipeline(copies[transport.rank], F.mse_loss, Mesh.local(dp=2), microbatches=1)
        optim = pipert.ZeroAdamW(pipe, zero=3)
        parameter = next(pipe.parameters())
        assert parameter.isnan().all()
        with optim.gathered():
            assert not parameter.isnan().any()
        held = sum(p.untyped_storage().nbytes() for p in pipe.parameters())
        assert held < sum(p.nbytes for p in pipe.parameters()) / 4
        optim.close()
        assert not parameter.isnan().any()
        torch.optim.SGD(pipe.parameters(), lr=0.1)  # another one may have them now
        pipe.step(vectors(2))

    run_ranks(2, rank)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"zero": 4}, "zero = 4 must be 0, 1, 2 or 3"),
        ({"zero": True}, "zero = True must be"),
        ({"clip": 0.0}, "must be a positive number"),
        ({"lr": -1.0}, "lr = -1.0 must be"),
        ({"betas": (0.9, 1.0)}, "betas = .* must be two numbers"),
        ({"amsgrad": True}, "amsgrad = True is not in ZeroAdamW"),
        ({"betas": 0.9}, "betas = 0.9 must be two numbers"),
        ({"params": 5}, "params = 5 cannot be used"),
        ({"params": [{"lr": 0.1}]}, "cannot be used"),
        ({"params": []}, "no group has the trainable parameter 0.0.weight"),
        ({"params": [nn.Parameter(torch.zeros(1))]}, "is not this rank's"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused_on_every_rank(options: dict[str, Any], words: str) -> None:
    copies = [tower(2) for _ in range(2)]

    def rank(transport: Any) -> None:
        pipe = Pipeline(copies[transport.rank], F.mse_loss, Mesh.local(dp=2), microbatches=1)
        with pytest.raises(ConfigError, match=words):
            pipert.ZeroAdamW(pipe, **options)
        optim = pipert.ZeroAdamW(pipe)  # it was not attached
        with pytest.raises(ConfigError, match="has an optimizer already"):
            pipert.ZeroAdamW(pipe)
        with pytest.raises(ConfigError, match="takes no closure"):
            optim.step(lambda: 0.0)
        with pytest.raises(ConfigError, match="groups are fixed"):
            optim.add_param_group({"params": []})

    run_ranks(2, rank)


def test_ranks_with_different_optimizers_are_refused() -> None:
    copies = [tower(2) for _ in range(2)]

    def rank(transport: Any) -> None:
        pipe = Pipeline(copies[transport.rank], F.mse_loss, Mesh.local(dp=2), microbatches=1)
        with pytest.raises(ConfigError, match="ranks 0 and 1 made different optimizers"):
            pipert.ZeroAdamW(pipe, zero=1 + transport.rank)

    run_ranks(2, rank)


def test_an_optimizer_whose_weights_depend_on_one_another_is_refused() -> None:
    pipe = Pipeline(tower(2), F.mse_loss, Mesh.local(), microbatches=1)
    with pytest.raises(ConfigError, match="updates a weight otherwise when it is cut into shards"):
        pipert.ZeroOptimizer(pipe, lambda p: torch.optim.Adafactor(p, lr=0.1))
    with pytest.raises(ConfigError, match="cannot update shards"):
        pipert.ZeroOptimizer(pipe, lambda p: torch.optim.LBFGS(p[0]["params"]))
