"""Random numbers depend on what they are for: not on layout, schedule, recompute or the moment."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipert.comm.local import run_ranks
from pipert.comm.mesh import Mesh
from pipert.engine.pipeline import Pipeline
from pipert.engine.reference import reference_step
from pipert.gpt_config import GPTConfig
from pipert.layers import Dropout
from pipert.models.gpt import GPT
from tests.engine.world import SCHEDULES, Outcome, assert_same, gpt, run_pipeline, seeded, token_loss, tokens, vectors


def foreign(blocks: int) -> nn.Sequential:
    """A model whose dropout draws from torch's global generator, in modules and in functions."""
    with seeded(0):
        rows = [nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3)) if i % 2 else Functional() for i in range(blocks)]
        return nn.Sequential(*rows).double()


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.linear(x), 0.4, self.training) + torch.rand_like(x) * 0.1


def reference(model: nn.Module, loss: Any, replicas: list[Any], microbatches: int, steps: int) -> Outcome:
    plain, outcome = copy.deepcopy(model), Outcome()
    for step in range(steps):
        first, *others = replicas
        outcome.results.append(reference_step(plain, loss, first, microbatches, replicas=others, seed=5, step=step))
    outcome.gradients = {name: p.grad for name, p in plain.named_parameters()}
    outcome.weights = {name: p.detach() for name, p in plain.named_parameters()}
    return outcome


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("recompute", ["none", "block", "full"])
@pytest.mark.parametrize("kind", ["ours", "foreign"])
def test_dropout_is_the_same_in_every_schedule_with_and_without_recompute(
    kind: str, recompute: str, schedule: str, chunks: int
) -> None:
    model: nn.Module = gpt(dropout=0.5, tied=False, layers=6) if kind == "ours" else foreign(8)
    loss: Any = token_loss if kind == "ours" else F.mse_loss
    batch = tokens(4) if kind == "ours" else vectors(4)
    mine = run_pipeline(
        model, loss, [[batch]] * 2, 4, schedule=schedule, chunks=chunks, microbatches=2, recompute=recompute, seed=5
    )
    mine.norms = []
    assert_same(mine, reference(model, loss, [batch], 2, 2), 0)


@pytest.mark.parametrize("kind", ["ours", "foreign"])
def test_replicas_draw_for_their_own_samples_of_the_global_batch(kind: str) -> None:
    model: nn.Module = gpt(dropout=0.5, layers=2) if kind == "ours" else foreign(4)
    loss: Any = token_loss if kind == "ours" else F.mse_loss
    make = tokens if kind == "ours" else vectors
    replicas = [make(3, seed=1), make(2, seed=2)]
    mine = run_pipeline(model, loss, [replicas], 2, 2, microbatches=2, seed=5)
    mine.norms = []
    assert_same(mine, reference(model, loss, replicas, 2, 1))


class Masks(nn.Module):
    """Dropout on ones."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.dropout = Dropout(0.5)
        self.scale = nn.Parameter(torch.ones(()))
        self.seen = seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = self.dropout(torch.ones_like(x))
        self.seen.append(mask.detach())
        return x * mask * self.scale


def test_masks_differ_between_layers_samples_steps_and_replicas() -> None:
    seen: list[list[torch.Tensor]] = [[] for _ in range(4)]

    def rank(transport: Any) -> None:
        model = nn.Sequential(Masks(seen[transport.rank]), Masks(seen[transport.rank]))
        pipe = Pipeline(model, F.mse_loss, Mesh.local(pp=2, dp=2), microbatches=2)
        for _ in range(2):
            pipe.step((torch.ones(2, 2000), torch.ones(2, 2000)))

    run_ranks(4, rank)
    masks = [row for masks in seen for mask in masks for row in mask]
    assert len(masks) == 2 * 2 * 2 * 2  # stages, replicas, samples, steps
    for i, mask in enumerate(masks):
        assert mask.mean() == pytest.approx(1.0, abs=0.1)
        for other in masks[:i]:
            assert float((mask == other).float().mean()) == pytest.approx(0.5, abs=0.05)


def noisy_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(F.dropout(output, 0.5), target)


def test_a_loss_that_draws_random_numbers_draws_the_same_in_every_layout() -> None:
    model, replicas = foreign(4), [vectors(3, seed=1), vectors(2, seed=2)]
    mine = run_pipeline(model, noisy_loss, [replicas], 2, 2, microbatches=2, seed=5)
    mine.norms = []
    assert_same(mine, reference(model, noisy_loss, replicas, 2, 1))


def test_the_callers_generator_is_neither_read_nor_moved() -> None:
    model = foreign(4)
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        mine = run_pipeline(model, F.mse_loss, [[vectors(4)]], 2, microbatches=2)
        losses.append(mine.results[0].loss)
        assert torch.equal(torch.get_rng_state(), before)
    assert losses[0] == losses[1]


class Statistics(nn.Module):
    """BatchNorm, which changes buffers in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


@pytest.mark.parametrize("recompute", ["none", "block", "full"])
def test_running_statistics_move_once_for_each_microbatch(recompute: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Statistics() for _ in range(4))).double()
    copies, plain = [copy.deepcopy(model) for _ in range(2)], copy.deepcopy(model)

    def rank(transport: Any) -> dict[str, torch.Tensor]:
        pipe = Pipeline(copies[transport.rank], F.mse_loss, Mesh.local(pp=2), microbatches=2, recompute=recompute)
        pipe.step(vectors(8))
        return {name: b for module in pipe.modules.values() for name, b in module.named_buffers()}

    reference_step(plain, F.mse_loss, vectors(8), 2)
    found = {name: buffer for buffers in run_ranks(2, rank) for name, buffer in buffers.items()}
    wanted = dict(plain.named_buffers())
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


SHAPE: dict[str, Any] = {"layers": 8, "hidden": 16, "heads": 4, "sequence": 16, "vocabulary": 61, "dropout": 0.0}


@pytest.mark.parametrize("tied", [False, True])
def test_initial_weights_are_the_same_in_every_layout_and_no_rank_holds_the_whole_model(tied: bool) -> None:
    config = GPTConfig(**SHAPE, tied=tied)

    def hashes(pp: int, chunks: int, dp: int) -> dict[str, str]:
        def rank(transport: Any) -> dict[str, torch.Tensor]:
            model = GPT(config)
            schedule = "interleaved" if chunks > 1 else "1f1b"
            mesh = Mesh.local(pp=pp, dp=dp)
            pipe = Pipeline(model, token_loss, mesh, schedule=schedule, chunks=chunks, microbatches=2, seed=9)
            real = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.is_meta}
            if pp > 1:
                assert len(real) < len(list(model.named_parameters(remove_duplicate=False)))
            return dict(pipe.named_parameters())

        found: dict[str, str] = {}
        for parameters in run_ranks(pp * dp, rank):
            for name, parameter in parameters.items():
                digest = hashlib.sha256(parameter.detach().numpy().tobytes()).hexdigest()
                assert found.setdefault(name, digest) == digest, name
        return found

    layouts = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 2, 1), (4, 2, 1), (1, 1, 2), (2, 1, 2)]
    first, *others = (hashes(*layout) for layout in layouts)
    assert all(other == first for other in others)
    assert set(first) == {name for name, _ in GPT(config).named_parameters()}
    same = [name for name in first if name.startswith("blocks.0") and first[name] == first[name.replace(".0", ".4", 1)]]
    assert all("norm" in name or "bias" in name for name in same)


def test_replicas_start_from_the_first_ones_weights() -> None:
    def rank(transport: Any) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(transport.rank)
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator))
        mesh = Mesh.local(pp=2, dp=2)
        pipe = Pipeline(model, F.mse_loss, mesh)
        return {f"{mesh.pp_rank} {name}": p.detach() for name, p in pipe.named_parameters()}

    outcomes = run_ranks(4, rank)
    for first, second in ((0, 1), (2, 3)):
        assert all(torch.equal(outcomes[first][name], outcomes[second][name]) for name in outcomes[first])
    assert not torch.equal(outcomes[0]["0 0.weight"], outcomes[2]["1 2.weight"])
