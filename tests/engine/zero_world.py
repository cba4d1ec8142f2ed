"""Train a small model with one of pipert's optimizers on threads, and look at what is left."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pipert.comm.local import run_ranks
from pipert.comm.mesh import Mesh
from pipert.engine.pipeline import Pipeline
from pipert.optim.zero import ZeroOptimizer
from tests.engine.world import Outcome, merge

Make = Callable[[Pipeline], ZeroOptimizer]


def train(
    model: nn.Module,
    loss_fn: Any,
    steps: Sequence[Sequence[Any]],
    pp: int,
    dp: int,
    make: Make,
    *,
    before: Callable[[Pipeline, ZeroOptimizer, int], None] | None = None,
    **options: Any,
) -> Outcome:
    """Train on threads: losses, norms, and weights and gradients at the end, checked to be equal on all ranks.

    Args:
        model: copied for every rank.
        loss_fn: as for Pipeline.
        steps: for each step the batch of each replica.
        pp: pipeline ranks.
        dp: replicas.
        make: makes the optimizer on each rank.
        before: called before each update, with the step's number.
        options: of Pipeline.
    """
    copies = [copy.deepcopy(model) for _ in range(pp * dp)]

    def rank(transport: Any) -> Outcome:
        mesh = Mesh.local(pp=pp, dp=dp)
        pipe = Pipeline(copies[transport.rank], loss_fn, mesh, **options)
        optim = make(pipe)
        outcome = Outcome()
        for number, step in enumerate(steps):
            if number:
                optim.zero_grad()
            result = pipe.step(step[mesh.dp_rank])
            outcome.results.append(replace(result, loss=comparable(result.loss)))
            outcome.norms.append(comparable(pipe.grad_norm()))
            if before is not None:
                before(pipe, optim, number)
            optim.step()
        outcome.gradients = optim.gradients()
        outcome.weights = weights(pipe, optim)
        return outcome

    return merge(run_ranks(pp * dp, rank))


def comparable(value: float) -> float:
    """The value, or a number that equals itself for NaN."""
    return -1.0 if math.isnan(value) else value


def weights(pipe: Pipeline, optim: ZeroOptimizer) -> dict[str, torch.Tensor]:
    """This rank's weights, whole."""
    with optim.gathered():
        return {name: parameter.detach().clone() for name, parameter in pipe.named_parameters()}


def state_of(pipe: Pipeline, optim: ZeroOptimizer) -> dict[str, torch.Tensor]:
    """Weights, and everything that the optimizer keeps."""
    kept = optim.state_dict()["state"]
    state = {f"{name}.{key}": torch.as_tensor(value) for name, one in kept.items() for key, value in one.items()}
    return weights(pipe, optim) | state
