"""A linear layer that initialises itself by name."""

from __future__ import annotations

import torch
from torch import nn

from pipert.layers.initial import draw_normal, fill_normal
from pipert.layers.names import join


class Linear(nn.Linear):
    """``x @ weight.T + bias`` with initial weights from N(0, std**2) and a bias of zeros.

    On the meta device `pipert.layers.materialise` gives it values by name; on a real one it draws them at once, from
    torch's global generator.

    Args:
        inputs: size of the last dimension of x.
        outputs: size of the last dimension of the result.
        bias: whether there is a bias.
        std: standard deviation of the initial weights.
        device: where the parameters live.
        dtype: dtype of the parameters.
    """

    uses_global_random = False  # so the engine need not seed torch's generator around it

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool = True,
        std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.std = std
        super().__init__(inputs, outputs, bias=bias, device=device, dtype=dtype)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new weights from torch's global generator."""
        draw_normal(self.weight, self.std)
        if self.bias is not None:
            self.bias.zero_()

    @torch.no_grad()
    def init_parameters(self, seed: int, prefix: str) -> None:
        """Fill weight and bias; see `pipert.layers.initial.Initialises`."""
        fill_normal(self.weight, self.std, seed, join(prefix, "weight"))
        if self.bias is not None:
            self.bias.zero_()
