"""What a loss counts, and the weight of a micro-batch in the loss of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from pipert.engine.blocks import uses_global_random
from pipert.engine.structure import flatten, unflatten
from pipert.errors import BatchError
from pipert.optim.precision import HALF

IGNORE_INDEX = -100


class LossFunction(Protocol):
    """The mean, over whatever it counts, of the loss of one micro-batch."""

    def __call__(self, output: Any, target: Any, /) -> torch.Tensor:
        """A scalar."""
        ...


CountFunction = Callable[[Any], float]


def example_loss(loss_fn: LossFunction) -> Callable[[Any], torch.Tensor] | None:
    """The loss of an output, to be measured; None if the loss does not say how targets look.

    One that does has a method ``example_targets(output)``, as `CausalLMLoss` has.
    """
    targets = getattr(loss_fn, "example_targets", None)
    return None if targets is None else lambda output: loss_fn(output, targets(output))


@dataclass(frozen=True, eq=False)
class Averaging:
    """How a loss function makes its mean, as far as it can be read off it.

    Attributes:
        reduction: what torch's losses call so; ``mean`` where nothing is said.
        ignore_index: the class that does not count.
        weight: the weights of the classes, by which torch's mean of a cross-entropy divides.
    """

    reduction: str = "mean"
    ignore_index: int = IGNORE_INDEX
    weight: torch.Tensor | None = None

    @staticmethod
    def of(loss_fn: object) -> Averaging:
        """Of one of torch's losses, alone, in a `functools.partial` or in a module; or of what has its attributes."""
        if isinstance(loss_fn, partial):
            if isinstance(loss_fn.func, nn.Module):
                return Averaging.of(loss_fn.func)
            return Averaging._said(loss_fn.keywords, by_class=loss_fn.func in (F.cross_entropy, F.nll_loss))
        if isinstance(loss_fn, nn.Module) and not hasattr(loss_fn, "ignore_index"):
            inner = [part for part in loss_fn.modules() if isinstance(part, nn.modules.loss._Loss)]
            loss_fn = inner[0] if len(inner) == 1 else loss_fn
        names = [name for name in ("reduction", "ignore_index", "weight") if hasattr(loss_fn, name)]
        by_class = isinstance(loss_fn, (nn.CrossEntropyLoss, nn.NLLLoss))
        return Averaging._said({name: getattr(loss_fn, name) for name in names}, by_class)

    @staticmethod
    def _said(said: Mapping[str, Any], by_class: bool) -> Averaging:
        reduction = str(said.get("reduction", "mean"))
        weight = said.get("weight") if by_class and reduction == "mean" else None
        return Averaging(reduction, said.get("ignore_index", IGNORE_INDEX), weight)

    def count(self, target: torch.Tensor) -> float:
        """What the mean divides by: for class indices those not ignored, or their weights; else the elements."""
        if self.reduction == "batchmean":
            return len(target)
        if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
            return target.numel()
        counted = target[target != self.ignore_index]
        if self.weight is None:
            return counted.numel()
        return float(self.weight.detach().double().to(target.device)[counted.long()].sum())


def default_count(loss_fn: object) -> CountFunction:
    """What mean losses count: targets that are not ignored where they are class indices, else elements."""
    averaging = Averaging.of(loss_fn)

    def count(target: object) -> float:
        tensors, _ = flatten(target)
        if len(tensors) != 1:
            raise BatchError(
                f"the targets hold {len(tensors)} tensors, so it is not clear what the loss is the mean of; "
                "pass Pipeline(…, count_fn=…), which gives for a micro-batch's targets how much its mean loss counts"
            )
        return averaging.count(tensors[0])

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
    if isinstance(count, torch.Tensor) and count.numel() == 1:
        count = count.item()
    try:
        return count if isinstance(count, int) else float(count)
    except (TypeError, ValueError):
        raise BatchError(f"count_fn returned {count!r:.80}; a count must be a finite number >= 0") from None


def weights(own: Sequence[float], total: float) -> tuple[float, ...]:
    """The weight of each micro-batch: its share of what the whole batch counts."""
    return tuple(count / total if count else 0.0 for count in own)


class Widened:
    """A loss function whose model computes in half precision: it is given float32 instead.

    Args:
        loss_fn: the loss function.
    """

    def __init__(self, loss_fn: LossFunction) -> None:
        self._loss_fn = loss_fn
        self.uses_global_random = uses_global_random(loss_fn)

    def __call__(self, output: Any, target: Any) -> torch.Tensor:
        """The loss of what both are in float32."""
        return self._loss_fn(_wide(output), _wide(target))


def _wide(value: Any) -> Any:
    tensors, structure = flatten(value)
    return unflatten(structure, [tensor.float() if tensor.dtype in HALF else tensor for tensor in tensors])


def weighted(loss: object, weight: float, scale: float = 1.0) -> torch.Tensor:
    """The micro-batch's part of the batch's loss, times the loss scale: the root of its backward pass.

    It is in float32 at least, for half precision has too few digits for a weight.

    Raises:
        BatchError: the loss is not a scalar tensor.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise BatchError(
            f"loss_fn returned {found}; it must return a scalar tensor, the mean over what count_fn counts"
        )
    wide = loss.float() if loss.dtype in HALF else loss
    return wide.reshape(()) * (weight * scale)
