"""The norms are the formulas in their docstrings."""

from __future__ import annotations

import torch
from torch import nn

from pipert.layers import LayerNorm, RMSNorm, materialise


def normal(norm: nn.Module) -> nn.Module:
    materialise(norm, "norm", dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_(generator=generator)
    return norm


def test_layer_norm_is_its_formula() -> None:
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    for bias in (True, False):
        norm = normal(LayerNorm(8, eps=1e-3, bias=bias, device="meta"))
        expected = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-3).sqrt()
        expected = expected * norm.weight + (norm.bias if bias else 0.0)
        torch.testing.assert_close(norm(x), expected, rtol=1e-12, atol=1e-12)


def test_rms_norm_is_its_formula() -> None:
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    norm = normal(RMSNorm(8, eps=1e-3, device="meta"))
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected, rtol=1e-12, atol=1e-12)
