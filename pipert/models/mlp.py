"""The feed-forward layer of a block."""

from __future__ import annotations

import math

import torch
from torch import nn

from pipert.gpt_config import GPTConfig
from pipert.layers import Linear, gelu, swiglu


class MLP(nn.Module):
    """``down(gelu(up(x)))``, or for SwiGLU ``down(silu(gate(x)) * up(x))`` with the gate's rows first in ``up``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.activation = config.activation
        residual_std = config.init_std / math.sqrt(2 * config.layers)
        self.up = Linear(config.hidden, config.up_width, bias=config.bias, std=config.init_std)
        self.down = Linear(config.mlp_width, config.hidden, bias=config.bias, std=residual_std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape (..., hidden) to the same."""
        activation = gelu if self.activation == "gelu" else swiglu
        down: torch.Tensor = self.down(activation(self.up(x)))
        return down
