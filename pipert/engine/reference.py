"""The run that defines the numbers: one process, plain autograd, the same micro-batches in the same order.

A pipeline's losses and gradients are those of `reference_step`: bitwise without replicas and tied weights, else to
rounding. Tests, documents and comparisons of runs use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pipert.engine import batch as batches
from pipert.engine.blocks import BlockRunner, uses_global_random
from pipert.engine.loss import CountFunction, LossFunction, Widened, counts, default_count, weighted, weights
from pipert.engine.result import StepResult
from pipert.graph.stage import StageModule, stage_module
from pipert.graph.trace import trace
from pipert.layers.dropout import name_layers
from pipert.optim.precision import HALF, Precision, accumulate
from pipert.randomness import Draw


def reference_step(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: object,
    microbatches: int,
    *,
    replicas: Sequence[object] = (),
    count_fn: CountFunction | None = None,
    seed: int = 0,
    step: int = 0,
    precision: Precision | None = None,
) -> StepResult:
    """Forward and backward of one batch in this process; gradients are added to the parameters' ``.grad``.

    Args:
        model: the whole model, with real parameters.
        loss_fn: as for `pipert.Pipeline`.
        batch: as for `Pipeline.step`; the first replica's, where there are several.
        microbatches: into how many each batch is split.
        replicas: the batches of the other replicas, in order.
        count_fn: as for `pipert.Pipeline`.
        seed: of dropout.
        step: the step's number; dropout depends on it.
        precision: as for `pipert.Pipeline`; the parameters must have its type already.

    Returns:
        what `Pipeline.step` returns.
    """
    parts = [
        pair
        for whole in (batch, *replicas)
        for pair in zip(
            batches.split(whole, batches.INPUTS, microbatches),
            batches.split(whole, batches.TARGETS, microbatches),
            strict=True,
        )
    ]
    counted = counts([target for _, target in parts], count_fn or default_count(loss_fn))
    runner, whole_model = _whole(model, parts[0][0])
    accumulate(model.parameters(), precision)
    if precision is not None and precision.parameters in HALF:
        loss_fn = Widened(loss_fn)
    loss, first = 0.0, 0
    for (inputs, target), weight in zip(parts, weights(counted, sum(counted)), strict=True):
        rows = batches.samples(inputs)
        runner.draw = Draw(seed, step, tuple(range(first, first + rows)))
        first += rows
        output = whole_model(inputs)
        if weight:
            mean = runner.bound("loss", loss_fn, uses_global_random(loss_fn))(output, target)
            weighted(mean, weight).backward()  # type: ignore[no-untyped-call]
            loss += weight * float(mean.detach().double())
    return StepResult(loss, sum(counted), first, len(parts), step)


def _whole(model: nn.Module, example: Any) -> tuple[BlockRunner, StageModule]:
    """The model as one stage."""
    name_layers(model)
    traced = trace(model, example)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    runner = BlockRunner({name: block.module for name, block in traced.blocks.items()}, device)
    return runner, stage_module(traced, 0, [list(traced.blocks)], runner)
