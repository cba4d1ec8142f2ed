"""Masked softmax in torch; the formulas of ``csrc/softmax.hip``."""

from __future__ import annotations

import torch

from pipert.hipkernels.reference.wide import wide


def softmax_forward(x: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool) -> torch.Tensor:
    """``softmax(scale * x)`` over what the masks leave; 0 in rows where they leave nothing."""
    scores = wide(x) * scale
    out = torch.zeros((), dtype=torch.bool, device=x.device)
    if mask is not None:
        out = ~mask
    if causal:
        queries, columns = x.shape[-2:]
        seen = torch.arange(columns, device=x.device) - (columns - queries)
        out = out | (seen[None, :] > torch.arange(queries, device=x.device)[:, None])
    scores = scores.masked_fill(out, float("-inf"))
    empty = (scores == float("-inf")).all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill(empty, 0.0).to(x.dtype)


def softmax_backward(dy: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
    """Gradient of x."""
    d, p = wide(dy), wide(y)
    return (p * (d - (d * p).sum(-1, keepdim=True)) * scale).to(y.dtype)
