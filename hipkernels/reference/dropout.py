"""Dropout by counter in torch; the same masks as ``csrc/philox.h``."""

from __future__ import annotations

import torch

from pipert.hipkernels.reference.wide import wide

_LOW = 0xFFFFFFFF


def philox(key: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    """Four words of Philox4x32-10 (Salmon et al. 2011) for every key and counter.

    Args:
        key: int64, broadcastable with counter.
        counter: int64.

    Returns:
        int64 in [0, 2**32), of the broadcast shape and a last dimension of 4.
    """
    zero = torch.zeros_like(key * 0 + counter)
    key, counter = key + zero, counter + zero
    a, b, c, d = counter & _LOW, (counter >> 32) & _LOW, zero, zero
    k, m = key & _LOW, (key >> 32) & _LOW
    for _ in range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57  # the low 64 bits, whatever their sign
        a, c = ((second >> 32) & _LOW) ^ b ^ k, ((first >> 32) & _LOW) ^ d ^ m
        b, d = second & _LOW, first & _LOW
        k, m = (k + 0x9E3779B9) & _LOW, (m + 0xBB67AE85) & _LOW
    return torch.stack((a, b, c, d), -1)


def kept(keys: torch.Tensor, elements: int, offset: int, threshold: int) -> torch.Tensor:
    """Which of ``elements`` elements from ``offset`` on are kept, for each key: bool, (keys, elements)."""
    first = offset // 4
    counters = torch.arange(first, (offset + elements + 3) // 4, device=keys.device)
    words = philox(keys[:, None], counters[None, :]).reshape(len(keys), -1)
    return words[:, offset - 4 * first :][:, :elements] >= threshold


def dropout_forward(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    keys: torch.Tensor,
    offset: int,
    threshold: int,
    factor: float,
) -> torch.Tensor:
    """``residual + dropout(x + bias)``."""
    value = wide(x) if bias is None else wide(x) + bias.to(wide(x).dtype)
    mask = kept(keys, x.numel() // max(len(keys), 1), offset, threshold).reshape(x.shape)
    value = torch.where(mask, value * factor, 0.0)
    return (value if residual is None else value + wide(residual)).to(x.dtype)
