"""What a loss counts, and the weight of a micro-batch in the loss of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from pipert.engine.structure import flatten
from pipert.errors import BatchError

IGNORE_INDEX = -100


class LossFunction(Protocol):
    """The mean, over whatever it counts, of the loss of one micro-batch."""

    def __call__(self, output: Any, target: Any, /) -> torch.Tensor:
        """A scalar."""
        ...


CountFunction = Callable[[Any], float]


def default_count(loss_fn: object) -> CountFunction:
    """What mean losses count: targets that are not ignored where they are class indices, else elements."""
    ignore = getattr(loss_fn, "ignore_index", IGNORE_INDEX)

    def count(target: object) -> float:
        tensors, _ = flatten(target)
        if len(tensors) != 1:
            raise BatchError(
                f"the targets hold {len(tensors)} tensors, so it is not clear what the loss is the mean of; "
                "pass Pipeline(…, count_fn=…), which gives for a micro-batch's targets how much its mean loss counts"
            )
        (tensor,) = tensors
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
            return tensor.numel()
        return int((tensor != ignore).sum())

    return count


def counts(targets: Sequence[object], count_fn: CountFunction) -> tuple[float, ...]:
    """What each micro-batch counts.

    Raises:
        BatchError: a count is not a finite number >= 0.
    """
    result = tuple(_number(count_fn(target)) for target in targets)
    for microbatch, count in enumerate(result):
        if not (math.isfinite(count) and count >= 0):
            raise BatchError(f"micro-batch {microbatch} counts {count}; a count must be a finite number >= 0")
    return result


def _number(count: Any) -> float:
    if isinstance(count, torch.Tensor):
        count = count.item()
    return count if isinstance(count, int) else float(count)


def weights(own: Sequence[float], total: float) -> tuple[float, ...]:
    """The weight of each micro-batch: its share of what the whole batch counts."""
    return tuple(count / total if count else 0.0 for count in own)


def weighted(loss: object, weight: float) -> torch.Tensor:
    """The micro-batch's part of the batch's loss: the root of its backward pass.

    Raises:
        BatchError: the loss is not a scalar tensor.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise BatchError(
            f"loss_fn returned {found}; it must return a scalar tensor, the mean over what count_fn counts"
        )
    return loss.reshape(()) * weight
