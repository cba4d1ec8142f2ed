"""Rotary positions (Su et al. 2021): queries and keys are turned by an angle that grows with the position."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

import pipert.hipkernels as hk


def rotate(x_BNTD: torch.Tensor, base: float) -> torch.Tensor:
    """Turn the pairs ``(x[d], x[d + D/2])`` of position t by ``t / base**(2d/D)`` radians.

    Angles, sines and cosines are computed in float64 (float32 angles are off by 1e-4 at position 2,000).

    Args:
        x_BNTD: shape (samples, heads, positions, head width D); D is even.
        base: the longest wavelength is ``2 pi base``.
    """
    shape = x_BNTD.shape[-2], x_BNTD.shape[-1], base
    if hk.usable(x_BNTD):
        tables = _kept_tables if _plain(x_BNTD) else _tables
        return hk.rotary(x_BNTD, *tables(*shape, x_BNTD.device, torch.float32))
    cos_Td, sin_Td = _tables(*shape, x_BNTD.device, x_BNTD.dtype)
    left, right = x_BNTD.chunk(2, dim=-1)
    return torch.cat((left * cos_Td - right * sin_Td, right * cos_Td + left * sin_Td), dim=-1)


def _plain(x: torch.Tensor) -> bool:
    """Whether tensors made beside x are ordinary ones, that may be kept."""
    return not torch.compiler.is_compiling() and type(x) is torch.Tensor and not torch._C._len_torch_dispatch_stack()


def _tables(
    positions: int, width: int, base: float, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, shape (positions, width / 2)."""
    frequency_d = base ** (torch.arange(width // 2, dtype=torch.float64, device="cpu") * (-2.0 / width))
    angle_Td = torch.outer(torch.arange(positions, dtype=torch.float64, device="cpu"), frequency_d)
    return angle_Td.cos().to(device, dtype), angle_Td.sin().to(device, dtype)


@lru_cache(maxsize=32)
def _kept_tables(*key: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`_tables`, which take longer to make than to apply."""
    with torch.inference_mode(False):  # so that backward passes may use them
        return _tables(*key)
