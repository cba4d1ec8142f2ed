"""Causal self-attention with grouped key and value heads, shared out among tensor-parallel ranks by heads.

Letters in names: B samples, T positions, H hidden, N query heads, K key/value heads, D head width; N and K of this
rank.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from pipert.comm.transport import Transport
from pipert.errors import ConfigError
from pipert.layers.parallel_linear import ColumnParallelLinear, RowParallelLinear, column_row_pair
from pipert.layers.rotary import rotate


class Attention(nn.Module):
    """``out(softmax(q k^T / sqrt(D) + causal mask) v)``, through torch's scaled_dot_product_attention.

    ``qkv.weight`` holds the rows of all queries, then all keys, then all values; within each, head by head. Each rank
    has some heads of each. With fewer key/value heads than ranks every one of them is on several ranks; the gradients
    of its rows are summed over them once a step (`pipert.layers.shard.is_summed`).

    Communication, for x of S bytes whole: forward an all-reduce of S (``out``), backward another one (``qkv``). With a
    ``sequence_dim`` forward an all-gather and a reduce-scatter of S, backward two all-gathers and a reduce-scatter.

    Args:
        hidden: width of x.
        heads: query heads of all ranks.
        kv_heads: key and value heads, each shared by as many query heads; default ``heads``.
        head_width: default ``hidden / heads``.
        group: the ranks; None for one alone.
        bias: whether the projections have one.
        rotary_base: turn queries and keys by their position (`pipert.layers.rotary.rotate`); None: do not.
        std: standard deviation of the initial weights of ``qkv``.
        out_std: of ``out``; default ``std``.
        sequence_dim: 1 where x is shared out among the ranks along its positions; None: every rank has all.
        overlap: whether communication and computation overlap in the backward.

    Raises:
        ConfigError: the heads cannot be shared out among so many ranks.
    """

    uses_global_random = False  # so the engine need not seed torch's generator around it
    uses_kernels = True
    recompute_me = "core"  #: what ``recompute="selective"`` computes again

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_width: int | None = None,
        group: Transport | None = None,
        bias: bool = True,
        rotary_base: float | None = None,
        std: float = 0.02,
        out_std: float | None = None,
        sequence_dim: int | None = None,
        overlap: bool = True,
    ) -> None:
        super().__init__()
        self.hidden, self.heads, self.kv_heads = hidden, heads, heads if kv_heads is None else kv_heads
        if heads % self.kv_heads:
            raise ConfigError(f"{heads} heads cannot share {self.kv_heads} kv_heads evenly; use a divisor of {heads}")
        self.width = hidden // heads if head_width is None else head_width
        self.bias, self.rotary_base = bias, rotary_base
        self.std, self.out_std = std, std if out_std is None else out_std
        self.qkv, self.out = self._projections(group, sequence_dim, overlap, None)

    def _projections(
        self, group: Transport | None, sequence_dim: int | None, overlap: bool, device: str | None
    ) -> tuple[ColumnParallelLinear, RowParallelLinear]:
        inner, of_keys = self.heads * self.width, self.kv_heads * self.width
        return column_row_pair(
            self.hidden,
            inner,
            self.hidden,
            pieces=((inner, self.heads), (of_keys, self.kv_heads), (of_keys, self.kv_heads)),
            units=self.heads,
            group=group,
            bias=self.bias,
            std=self.std,
            out_std=self.out_std,
            sequence_dim=sequence_dim,
            overlap=overlap,
            device=device,
        )

    def share_out(self, group: Transport, *, sequence_dim: int | None = None, overlap: bool = True) -> None:
        """Become this rank's part of the layer, in place; it was whole."""
        qkv, out = self._projections(group, sequence_dim, overlap, "meta")
        qkv.adopt(self.qkv)
        out.adopt(self.out)
        self.qkv, self.out = qkv, out

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        """Shape (samples, positions, hidden) to the same; position t sees positions 0..t."""
        y_BTH: torch.Tensor = self.out(self.core(self.qkv(x_BTH)))
        return y_BTH

    def core(self, rows: torch.Tensor) -> torch.Tensor:
        """Attention between the projections: no parameters, little to compute for what it keeps."""
        heads = rows.view(*rows.shape[:2], -1, self.width).transpose(1, 2)
        size = self.qkv.group.size
        queries, keys = self.heads // size, max(1, self.kv_heads // size)
        q_BNTD, k_BKTD, v_BKTD = torch.split(heads, [queries, keys, keys], dim=1)
        if self.rotary_base is not None:
            q_BNTD, k_BKTD = rotate(q_BNTD, self.rotary_base), rotate(k_BKTD, self.rotary_base)
        y_BNTD = F.scaled_dot_product_attention(q_BNTD, k_BKTD, v_BKTD, is_causal=True, enable_gqa=keys != queries)
        return y_BNTD.transpose(1, 2).flatten(2)
