"""Rotary positions in torch; the formula of ``csrc/rotary.hip``."""

from __future__ import annotations

import torch

from pipert.hipkernels.reference.wide import wide


def rotary(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, inverse: bool, dim: int) -> torch.Tensor:
    """Turn pairs half a head apart; positions are in dimension ``dim``."""
    half = cosines.shape[-1]
    shape = [1] * x.dim()
    shape[dim], shape[-1] = cosines.shape
    value = wide(x)
    cosine, sine = (table.to(value.dtype).reshape(shape) for table in (cosines, -sines if inverse else sines))
    left, right, rest = value[..., :half], value[..., half : 2 * half], value[..., 2 * half :]
    return torch.cat((left * cosine - right * sine, right * cosine + left * sine, rest), -1).to(x.dtype)
