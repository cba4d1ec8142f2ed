"""Statistics and gradient of cross-entropy in torch; the formulas of ``csrc/cross_entropy.hip``."""

from __future__ import annotations

import torch

from pipert.hipkernels.reference.wide import wide


def statistics(logits: torch.Tensor, targets: torch.Tensor, columns: int, first: int) -> torch.Tensor:
    """Rows of maximum, sum of powers, logit of the target (0 if it is not here), sum relative to the maximum."""
    x = wide(logits[:, :columns])
    most = x.amax(-1)
    base = torch.where(most == float("-inf"), 0.0, most)
    relative = x - base[:, None]
    here = (targets >= first) & (targets < first + columns)
    hit = x.gather(1, torch.where(here, targets - first, 0)[:, None])[:, 0]
    return torch.stack((most, relative.exp().sum(-1), torch.where(here, hit, 0.0), relative.sum(-1)))


def gradient(
    out: torch.Tensor,
    logits: torch.Tensor,
    targets: torch.Tensor,
    maximum: torch.Tensor,
    inverse_sum: torch.Tensor,
    gradient: torch.Tensor,
    columns: int,
    first: int,
    hit: float,
    even: float,
) -> None:
    """Into ``out``, which may be the logits."""
    value = (wide(logits[:, :columns]) - maximum[:, None]).exp() * inverse_sum[:, None] - even
    here = (targets >= first) & (targets < first + columns)
    index = torch.where(here, targets - first, 0)[:, None]
    value = value.scatter_add(1, index, -hit * here[:, None].to(value.dtype))
    value = torch.where(gradient[:, None] == 0, 0.0, value * gradient[:, None])
    out[:, :columns] = value.to(out.dtype)
    out[:, columns:] = 0
