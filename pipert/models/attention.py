"""Causal self-attention with grouped key and value heads.

Letters in names: B samples, T positions, H hidden, N query heads, K key/value heads, D head width.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from pipert.gpt_config import GPTConfig
from pipert.layers import Linear
from pipert.models.rotary import rotate


class Attention(nn.Module):
    """``out(softmax(q k^T / sqrt(D) + causal mask) v)``, through torch's scaled_dot_product_attention.

    ``qkv.weight`` holds the rows of all queries, then all keys, then all values; within each, head by head.
    """

    recompute_me = "core"  #: what ``recompute="selective"`` computes again

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        residual_std = config.init_std / math.sqrt(2 * config.layers)
        self.qkv = Linear(config.hidden, config.qkv_width, bias=config.bias, std=config.init_std)
        self.out = Linear(config.hidden, config.hidden, bias=config.bias, std=residual_std)

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        """Shape (samples, positions, hidden) to the same; position t sees positions 0..t."""
        y_BTH: torch.Tensor = self.out(self.core(self.qkv(x_BTH)))
        return y_BTH

    def core(self, rows: torch.Tensor) -> torch.Tensor:
        """Attention between the projections: no parameters, little to compute for what it keeps."""
        config = self.config
        samples, positions, _ = rows.shape
        heads = rows.view(samples, positions, -1, config.head_width).transpose(1, 2)
        q_BNTD, k_BKTD, v_BKTD = torch.split(heads, [config.heads, config.key_heads, config.key_heads], dim=1)
        if config.positions == "rotary":
            q_BNTD, k_BKTD = rotate(q_BNTD, config.rotary_base), rotate(k_BKTD, config.rotary_base)
        y_BNTD = F.scaled_dot_product_attention(
            q_BNTD, k_BKTD, v_BKTD, is_causal=True, enable_gqa=config.key_heads != config.heads
        )
        return y_BNTD.transpose(1, 2).reshape(samples, positions, config.hidden)
