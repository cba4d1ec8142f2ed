"""The precision in which references compute."""

from __future__ import annotations

import torch


def wide(x: torch.Tensor) -> torch.Tensor:
    """``x`` in the dtype that references compute in: float32, or float64 if it is that."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)
