"""Evaluation needs no set-up, takes other sizes, and changes nothing."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipert.comm.local import run_ranks
from pipert.comm.mesh import Mesh
from pipert.engine.pipeline import Pipeline
from pipert.engine.programs import forward_schedule
from pipert.scheduler.generators.registry import generate
from tests.engine.world import SCHEDULES, SGD, Outcome, assert_same, merge, parts, run_plain, tower, vectors


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_evaluations_between_steps_leave_training_as_it_is(schedule: str, chunks: int) -> None:
    model = tower(8)
    train, held_out, more = vectors(8), vectors(8, seed=1), vectors(15, seed=2)
    copies = [copy.deepcopy(model) for _ in range(4)]

    def rank(transport: Any) -> Outcome:
        pipe = Pipeline(
            copies[transport.rank], F.mse_loss, Mesh.local(pp=4), schedule=schedule, chunks=chunks, microbatches=4
        )
        optim = SGD(pipe.parameters())
        outcome = Outcome()
        start = pipe.eval_step(held_out, microbatches=1)
        for step in range(2):
            optim.zero_grad()
            outcome.results.append(pipe.step(train))
            outcome.norms.append(pipe.grad_norm())
            optim.step()
            if step == 0:
                first = pipe.eval_step(held_out, microbatches=1), pipe.eval_step(more, microbatches=3)
                second = pipe.eval_step(held_out, microbatches=1), pipe.eval_step(more, microbatches=3)
                assert first == second
                assert first[0].loss < start.loss
                assert (first[1].microbatches, first[1].samples) == (3, 15)
        outcome.gradients = {name: p.grad for name, p in pipe.named_parameters()}
        outcome.weights = {name: p.detach() for name, p in pipe.named_parameters()}
        return outcome

    plain = run_plain(model, F.mse_loss, [[parts(train, 4)]] * 2, optimizer=SGD)
    assert_same(merge(run_ranks(4, rank)), plain, 0)


def test_an_evaluation_gives_the_loss_and_the_outputs_of_one_process() -> None:
    model, batch = tower(4), vectors(7)

    def rank(transport: Any) -> Any:
        pipe = Pipeline(copy.deepcopy(model), F.mse_loss, Mesh.local(pp=2), microbatches=2)
        return pipe.eval_step(batch, microbatches=3, outputs=True)

    first, last = run_ranks(2, rank)
    assert first == last
    assert first.outputs is None
    with torch.no_grad():
        wanted = model(batch[0])
    torch.testing.assert_close(torch.cat(last.outputs), wanted, rtol=1e-12, atol=1e-12)
    assert last.loss == pytest.approx(float(F.mse_loss(wanted, batch[1])), rel=1e-12)


class Watched(nn.Module):
    """Remembers its outputs weakly and the modes in which it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.frozen_norm = nn.Dropout(0.5).eval()
        self.outputs: list[Any] = []
        self.modes: list[tuple[bool, bool, bool]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        self.outputs.append(weakref.ref(y))
        self.modes.append((self.training, self.frozen_norm.training, y.requires_grad))
        return y


def test_no_graph_is_kept_and_every_module_gets_its_mode_back() -> None:
    models = [nn.Sequential(*(Watched() for _ in range(4))).double() for _ in range(2)]

    def rank(transport: Any) -> None:
        pipe = Pipeline(models[transport.rank], F.mse_loss, Mesh.local(pp=2), microbatches=2)
        pipe.eval_step(vectors(4))
        pipe.step(vectors(4))

    run_ranks(2, rank)
    gc.collect()
    for watched in (m for model in models for m in model if m.outputs):
        assert all(reference() is None for reference in watched.outputs)
        assert watched.modes == [(False, False, False)] * 2 + [(True, False, True)] * 2


def test_a_schedule_for_one_number_of_microbatches_evaluates_any_other() -> None:
    model, batch = tower(6), vectors(9)
    schedule = generate("interleaved", 3, 4, 2)

    def rank(transport: Any) -> float:
        pipe = Pipeline(copy.deepcopy(model), F.mse_loss, Mesh.local(pp=3), schedule=schedule, microbatches=4)
        return pipe.eval_step(batch, microbatches=9).loss

    with torch.no_grad():
        assert run_ranks(3, rank)[0] == pytest.approx(float(F.mse_loss(model(batch[0]), batch[1])), rel=1e-12)


def test_the_forward_schedule_goes_round_the_ranks_in_groups() -> None:
    placement = generate("interleaved", 2, 2, 2).placement
    rows = forward_schedule(placement, 3).rows
    assert str(rows[0]) == "0F0 0F1 2F0 2F1 0F2 2F2"
    assert str(rows[1]) == "1F0 1F1 3F0 3F1 1F2 3F2"
