"""Initial values that depend on (seed, parameter name) only."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from pipert.randomness import stream


@runtime_checkable
class Initialises(Protocol):
    """A module that can fill the parameters and buffers it owns itself, not those of its children."""

    def init_parameters(self, seed: int, prefix: str) -> None:
        """Fill them.

        Args:
            seed: the run's seed.
            prefix: the module's name in the whole model; values come from ``stream(seed, f"{prefix}.weight")``.
        """
        ...


@torch.no_grad()
def fill_normal(tensor: torch.Tensor, std: float, seed: int, name: str) -> None:
    """Fill with the normal distribution's stream of this name, mean 0.

    The numbers are drawn in float32 on the CPU, then copied: the same for every dtype (but for rounding) and device.
    """
    values = torch.empty(tensor.shape, dtype=torch.float32)
    tensor.copy_(values.normal_(0.0, std, generator=stream(seed, name)))
