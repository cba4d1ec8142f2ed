"""Normalisation over the last dimension."""

from __future__ import annotations

import torch
from torch import nn


class LayerNorm(nn.LayerNorm):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` (Ba et al. 2016); weight starts at one, bias at zero."""

    uses_global_random = False  # so the engine need not seed torch's generator around it

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


class RMSNorm(nn.RMSNorm):
    """``x / sqrt(mean(x**2) + eps) * weight`` (Zhang and Sennrich 2019); weight starts at one."""

    uses_global_random = False  # so the engine need not seed torch's generator around it

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
