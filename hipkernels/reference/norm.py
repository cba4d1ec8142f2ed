"""LayerNorm and RMSNorm in torch; the formulas of ``csrc/norm.hip``."""

from __future__ import annotations

import torch

from pipert.hipkernels.reference.wide import wide


def norm_forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    centred: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``y``, the summed input ``h`` (empty without residual), and mean and reciprocal deviation of each row."""
    h = x if residual is None else x + residual
    h_wide = wide(h)
    mean = h_wide.mean(-1, keepdim=True) if centred else torch.zeros_like(h_wide[..., :1])
    rstd = ((h_wide - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
    y = (h_wide - mean) * rstd * weight.to(h_wide.dtype)
    if bias is not None:
        y = y + bias.to(h_wide.dtype)
    return y.to(x.dtype), x.new_empty(0) if residual is None else h, mean.reshape(-1), rstd.reshape(-1)


def norm_backward(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    h: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    centred: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the input, the weight and the bias, which is wide."""
    shape = (*h.shape[:-1], 1)
    dy_wide, rstd = wide(dy), rstd.reshape(shape)
    normal = (wide(h) - mean.reshape(shape)) * rstd
    g = dy_wide * weight.to(dy_wide.dtype)
    dx = g - normal * (g * normal).mean(-1, keepdim=True)
    if centred:
        dx = dx - g.mean(-1, keepdim=True)
    dx = dx * rstd
    if dh is not None:
        dx = dx + wide(dh)
    rows = tuple(range(h.dim() - 1))
    return dx.to(h.dtype), (dy_wide * normal).sum(rows).to(weight.dtype), dy_wide.sum(rows)
