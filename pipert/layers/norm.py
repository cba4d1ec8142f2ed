"""Normalisation over the last dimension, and with it the addition that comes before in a residual stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import pipert.hipkernels as hk


class LayerNorm(nn.LayerNorm):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` (Ba et al. 2016); weight starts at one, bias at zero."""

    uses_global_random = False  # so the engine need not seed torch's generator around it
    uses_kernels = True

    def __init__(
        self,
        hidden: int,
        *,
        eps: float = 1e-5,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden, eps=eps, bias=bias, device=device, dtype=dtype)

    @torch.no_grad()
    def init_parameters(self, seed: int, prefix: str) -> None:
        """Fill weight and bias; see `pipert.layers.initial.Initialises`."""
        self.weight.fill_(1.0)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """The norm of ``x``; with a residual, two results: the norm of ``x + residual``, and that sum."""
        if not hk.usable(x):
            return _torchs(super().forward, x, residual)
        if residual is None:
            return hk.layer_norm(x, self.weight, self.bias, self.eps)
        return hk.add_layer_norm(x, residual, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """``x / sqrt(mean(x**2) + eps) * weight`` (Zhang and Sennrich 2019); weight starts at one."""

    uses_global_random = False  # so the engine need not seed torch's generator around it
    uses_kernels = True
    eps: float

    def __init__(
        self,
        hidden: int,
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden, eps=eps, device=device, dtype=dtype)

    @torch.no_grad()
    def init_parameters(self, seed: int, prefix: str) -> None:
        """Fill the weight; see `pipert.layers.initial.Initialises`."""
        self.weight.fill_(1.0)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """The norm of ``x``; with a residual, two results: the norm of ``x + residual``, and that sum."""
        if not hk.usable(x):
            return _torchs(super().forward, x, residual)
        if residual is None:
            return hk.rms_norm(x, self.weight, self.eps)
        return hk.add_rms_norm(x, residual, self.weight, self.eps)


def _torchs(norm: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, residual: torch.Tensor | None) -> Any:
    if residual is None:
        return norm(x)
    added = x + residual
    return norm(added), added
