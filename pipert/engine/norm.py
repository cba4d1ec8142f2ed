"""The norm of all gradients of the model: the same on every rank."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable

import torch

from pipert.comm.transport import Transport
from pipert.engine.parameters import Owned


def gradient_norm(owned: Iterable[Owned], transport: Transport) -> float:
    """The 2-norm of all gradients of the model, each parameter counted once.

    The squared norm of each parameter is taken in float64; they are summed in the model's order, so the result does not
    depend on where the parameters are.

    Args:
        owned: this rank's parameters.
        transport: the ranks of the pipeline.
    """
    counted = [entry for entry in owned if entry.counted and entry.parameter.grad is not None]
    mine = list(zip((entry.order for entry in counted), squared_norms([e.parameter for e in counted]), strict=True))
    everybody = transport.exchange(json.dumps(mine).encode())
    squares = sorted(tuple(pair) for blob in everybody for pair in json.loads(blob))
    return math.sqrt(sum(square for _, square in squares))


def squared_norms(parameters: Iterable[torch.nn.Parameter]) -> list[float]:
    """The sum of squares of each parameter's gradient, in float64."""
    norms = []
    for parameter in parameters:
        assert parameter.grad is not None
        gradient = parameter.grad.coalesce().values() if parameter.grad.is_sparse else parameter.grad
        dtype = torch.complex128 if gradient.is_complex() else torch.float64
        norms.append(torch.linalg.vector_norm(gradient, dtype=dtype))
    return [norm**2 for norm in torch.stack(norms).tolist()] if norms else []


def multiply(owned: Iterable[Owned], factor: float) -> None:
    """Multiply all gradients."""
    if factor != 1.0:
        for entry in owned:
            if entry.parameter.grad is not None:
                entry.parameter.grad.mul_(factor)
