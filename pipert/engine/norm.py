"""The norm of all gradients of the model: the same on every rank."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence

import torch

from pipert.comm.transport import Transport
from pipert.engine.parameters import Owned
from pipert.layers.shard import shard_of


def gradient_norm(owned: Iterable[Owned], transport: Transport, tensor: Transport | None = None) -> float:
    """The 2-norm of all gradients of the model, each parameter counted once.

    The squared norm of each parameter is taken in float64; they are summed in the model's order, so the result does not
    depend on where the parameters are. Of a sharded parameter the tensor-parallel ranks' parts are summed first, in
    their order; one that all of them have whole counts once.

    Args:
        owned: this rank's parameters.
        transport: the ranks of the pipeline.
        tensor: the tensor-parallel ranks; None for one alone.
    """
    counted = [entry for entry in owned if entry.counted and entry.parameter.grad is not None]
    mine = dict(zip((entry.order for entry in counted), squared_norms([e.parameter for e in counted]), strict=True))
    if tensor is not None and tensor.size > 1:
        parts = [dict(json.loads(blob)) for blob in tensor.exchange(json.dumps(list(mine.items())).encode())]
        sharded = {entry.order for entry in counted if shard_of(entry.parameter) is not None}
        mine = {order: sum(part[order] for part in (parts if order in sharded else parts[:1])) for order in mine}
    return norm_of(list(mine.items()), transport)


def norm_of(squares: Sequence[tuple[int, float]], transport: Transport) -> float:
    """The norm from every rank's sums of squares: first over the parts of each parameter, then in the model's order.

    Args:
        squares: (order in the model, sum of squares) of what this rank has.
        transport: all ranks that have something.
    """
    totals: dict[int, float] = {}
    for blob in transport.exchange(json.dumps(squares).encode()):
        for order, square in json.loads(blob):
            totals[order] = totals.get(order, 0.0) + square
    return math.sqrt(sum(totals[order] for order in sorted(totals)))


def squared_norms(parameters: Iterable[torch.nn.Parameter]) -> list[float]:
    """The sum of squares of each parameter's gradient, in float64; of a shard, of the rows that count here."""
    norms = []
    for parameter in parameters:
        assert parameter.grad is not None
        gradient = parameter.grad.coalesce().values() if parameter.grad.is_sparse else parameter.grad
        shard = shard_of(parameter)
        if shard is not None and shard.shared:
            rows = [gradient.narrow(shard.dim, start, stop - start) for start, stop in ((0, 0), *shard.counted)]
            gradient = torch.cat(rows, shard.dim)
        dtype = torch.complex128 if gradient.is_complex() else torch.float64
        norms.append(torch.linalg.vector_norm(gradient, dtype=dtype))
    return [norm**2 for norm in torch.stack(norms).tolist()] if norms else []


def multiply(owned: Iterable[Owned], factor: float) -> None:
    """Multiply all gradients."""
    if factor != 1.0:
        for entry in owned:
            if entry.parameter.grad is not None:
                entry.parameter.grad.mul_(factor)
