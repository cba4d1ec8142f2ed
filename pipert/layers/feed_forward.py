"""The feed-forward layer of a transformer block, shared out among tensor-parallel ranks by its inner features."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from pipert.comm.transport import Transport
from pipert.layers.activation import gelu, swiglu
from pipert.layers.parallel_linear import ColumnParallelLinear, RowParallelLinear, column_row_pair

Activation = Literal["gelu", "swiglu"]


class FeedForward(nn.Module):
    """``down(gelu(up(x)))``, or for SwiGLU ``down(silu(gate(x)) * up(x))`` with the gate's rows first in ``up``.

    Each rank has some inner features: of SwiGLU the rows of the gate and those of the up projection that belong
    together. Which those are the weight's `pipert.layers.shard.Shard` tells, so parts and whole can be turned into each
    other exactly.

    Communication, for x of S bytes whole: forward an all-reduce of S (``down``), backward another one (``up``). With a
    ``sequence_dim`` forward an all-gather and a reduce-scatter of S, backward two all-gathers and a reduce-scatter.

    Args:
        hidden: width of x.
        width: inner features of all ranks.
        activation: GELU (tanh form), or SwiGLU (Shazeer 2020).
        group: the ranks; None for one alone.
        bias: whether the projections have one.
        std: standard deviation of the initial weights of ``up``.
        out_std: of ``down``; default ``std``.
        sequence_dim: the dimension of x that is shared out among the ranks; None: every rank has all.
        overlap: whether communication and computation overlap in the backward.

    Raises:
        ConfigError: the inner features cannot be shared out among so many ranks.
    """

    uses_global_random = False  # so the engine need not seed torch's generator around it
    uses_kernels = True

    def __init__(
        self,
        hidden: int,
        width: int,
        *,
        activation: Activation = "gelu",
        group: Transport | None = None,
        bias: bool = True,
        std: float = 0.02,
        out_std: float | None = None,
        sequence_dim: int | None = None,
        overlap: bool = True,
    ) -> None:
        super().__init__()
        self.hidden, self.width, self.activation, self.bias = hidden, width, activation, bias
        self.std, self.out_std = std, std if out_std is None else out_std
        self.up, self.down = self._projections(group, sequence_dim, overlap, None)

    def _projections(
        self, group: Transport | None, sequence_dim: int | None, overlap: bool, device: str | None
    ) -> tuple[ColumnParallelLinear, RowParallelLinear]:
        pieces = ((self.width, self.width),) * (2 if self.activation == "swiglu" else 1)
        return column_row_pair(
            self.hidden,
            self.width,
            self.hidden,
            pieces=pieces,
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
        up, down = self._projections(group, sequence_dim, overlap, "meta")
        up.adopt(self.up)
        down.adopt(self.down)
        self.up, self.down = up, down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape (..., hidden) to the same."""
        activation = gelu if self.activation == "gelu" else swiglu
        down: torch.Tensor = self.down(activation(self.up(x)))
        return down
