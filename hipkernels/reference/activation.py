"""GELU with a bias and SwiGLU in torch; the formulas of ``csrc/activation.hip``."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from pipert.hipkernels.reference.wide import wide


def gelu_forward(x: torch.Tensor, bias: torch.Tensor | None, tanh: bool) -> torch.Tensor:
    """``gelu(x + bias)``."""
    z = wide(x) if bias is None else wide(x) + bias.to(wide(x).dtype)
    return F.gelu(z, approximate="tanh" if tanh else "none").to(x.dtype)


def gelu_backward(
    dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, tanh: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x and of the bias (empty without one)."""
    z = wide(x) if bias is None else wide(x) + bias.to(wide(x).dtype)
    if tanh:
        inner = math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)
        t = inner.tanh()
        slope = 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * z * z)
    else:
        slope = 0.5 * torch.special.erfc(-z / math.sqrt(2)) + z * torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    dz = wide(dy) * slope
    dbias = x.new_empty(0) if bias is None else dz.reshape(-1, x.shape[-1]).sum(0).to(bias.dtype)
    return dz.to(x.dtype), dbias


def swiglu_forward(x: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` for the halves of the last dimension."""
    gate, up = wide(x).chunk(2, -1)
    return (F.silu(gate) * up).to(x.dtype)


def swiglu_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Gradient of x."""
    gate, up = wide(x).chunk(2, -1)
    s, d = gate.sigmoid(), wide(dy)
    return torch.cat((d * up * s * (1 + gate * (1 - s)), d * gate * s), -1).to(x.dtype)
