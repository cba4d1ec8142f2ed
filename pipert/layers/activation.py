"""Activations of feed-forward layers."""

from __future__ import annotations

import torch
from torch.nn import functional as F

import pipert.hipkernels as hk


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU by tanh (Hendrycks and Gimpel 2016), elementwise."""
    return hk.bias_gelu(x, approximate="tanh") if hk.usable(x) else F.gelu(x, approximate="tanh")


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` (Shazeer 2020), gate and up the halves of the last dimension of x."""
    if hk.usable(x):
        return hk.swiglu(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
