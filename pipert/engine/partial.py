"""Gradients of which each tensor-parallel rank found a part: their sum, once a step.

These are few: the gradients of norms and biases under sequence parallelism, and those of key and value heads that
several ranks hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from pipert.comm.transport import Transport
from pipert.layers.shard import is_partial, is_summed, shard_of


def sum_partial(parameters: Iterable[torch.nn.Parameter], group: Transport) -> None:
    """Sum the gradients that need it over the ranks, in place: one all-reduce of their bytes for each dtype.

    Of a key or value projection the whole is summed, of which each rank has its rows. All ranks run the same program at
    the same time, so none waits for long.

    Args:
        parameters: those that are not `is_summed`, or have no gradient, are left alone; the same ones on every rank.
        group: the tensor-parallel ranks.
    """
    if group.size == 1:
        return
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        if is_summed(parameter) and parameter.grad is not None:
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter)
    for summed in by_dtype.values():
        pieces = [piece for parameter in summed for piece in _pieces(parameter)]
        flat = torch.cat([_spread(*piece).reshape(-1) for piece in pieces])
        group.wait(group.iallreduce(flat), "the sum of tensor-parallel gradients")
        for (rows, first, size), part in zip(pieces, torch.split(flat, [_numel(*p) for p in pieces]), strict=True):
            rows.copy_(part.view(size, *rows.shape[1:])[first : first + len(rows)])


def _pieces(parameter: torch.Tensor) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Rows of a gradient, views; the first one's number in what is summed; and how many rows that has."""
    gradient, shard = parameter.grad, shard_of(parameter)
    assert gradient is not None
    if is_partial(parameter):
        yield (gradient, 0, len(gradient)) if gradient.dim() else (gradient[None], 0, 1)
    elif shard is not None:
        for start, stop, first, size in shard.shared_places():
            yield gradient.transpose(0, shard.dim)[start:stop], first, size


def _spread(rows: torch.Tensor, first: int, size: int) -> torch.Tensor:
    """Rows at their place among all of them, zeros elsewhere."""
    if len(rows) == size:
        return rows
    whole = rows.new_zeros(size, *rows.shape[1:])
    whole[first : first + len(rows)] = rows
    return whole


def _numel(rows: torch.Tensor, first: int, size: int) -> int:
    return size * rows[:1].numel() if len(rows) else 0
