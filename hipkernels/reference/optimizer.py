"""AdamW, squared norms, scaling and casting in torch; the formulas of ``csrc/optimizer.hip``."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def adamw(
    param: torch.Tensor | None,
    master: torch.Tensor,
    average: torch.Tensor,
    square: torch.Tensor,
    grad: torch.Tensor,
    scale: torch.Tensor | None,
    skip: torch.Tensor | None,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    step_size: float,
    root: float,
) -> None:
    """One step in place; the arguments of ``pipert_adamw``."""
    g = grad.to(master.dtype)
    if scale is not None:
        g = g * scale.to(g.dtype)
    new_average = average.lerp(g.to(average.dtype), 1.0 - beta1)
    new_square = square * beta2 + g * g * (1.0 - beta2)
    new_master = master * (1.0 - decay) - new_average / (new_square.sqrt() / root + eps) * step_size
    pairs = [(average, new_average), (square, new_square), (master, new_master)]
    for old, new in pairs + ([] if param is None else [(param, new_master)]):
        old.copy_(new.to(old.dtype) if skip is None else torch.where(skip != 0, old, new.to(old.dtype)))


def squared_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of the squares of all elements, a float64 scalar."""
    sums = [tensor.detach().double().square().sum() for tensor in tensors]
    return torch.stack(sums).sum()


def scale_cast(
    out: torch.Tensor, x: torch.Tensor, scale: torch.Tensor | None, factor: float, overflow: torch.Tensor | None
) -> None:
    """``out = x * scale * factor``; ``overflow`` becomes 1 if a result is not finite."""
    compute = torch.float64 if torch.float64 in (x.dtype, out.dtype) else torch.float32
    value = x.to(compute) * ((1.0 if scale is None else scale.to(compute)) * factor)
    out.copy_(value)
    if overflow is not None:
        overflow.masked_fill_(~out.isfinite().all(), 1.0)
