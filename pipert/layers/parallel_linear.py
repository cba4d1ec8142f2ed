"""Linear layers whose weight is shared out among tensor-parallel ranks (Shoeybi et al. 2019, arXiv 1909.08053).

   x (whole, or a part of the sequence)
   │  column: each rank has some rows of the weight, so some features of the result
y_i = x W_iᵀ          nothing travels forward; backward the gradients of x are summed
   │  any function of single features
z_i
   │  row: each rank has some columns of the weight, so a part of every sum
Σ_i z_i W_iᵀ          the parts are summed forward; nothing travels backward
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import has_torch_function

from pipert.comm.single import SingleTransport
from pipert.comm.transport import Transport
from pipert.layers.collectives import (
    all_gather,
    all_reduce,
    copy_to_ranks,
    gather_shared,
    reduce_scatter,
    scatter,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from pipert.layers.linear import Linear
from pipert.layers.materialise import fill_like, template
from pipert.layers.shard import Shard, Tied, is_partial, mark_partial, set_shard, sharded_parameter

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def column_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: Transport,
    *,
    sequence_dim: int | None = None,
    overlap: bool = True,
    multiply: Multiply = F.linear,
) -> torch.Tensor:
    """``F.linear(x, weight, bias)`` where each rank has other rows of the weight.

    Backward, the gradients of x are summed over the ranks, while the weight's gradient is computed.

    Args:
        x: (..., inputs), the same on every rank; or this rank's part of it along ``sequence_dim``.
        weight: (own outputs, inputs).
        bias: (own outputs,).
        group: the ranks.
        sequence_dim: the dimension of x that is shared out; then x is gathered first.
        overlap: whether sums travel while gradients are computed. The numbers are bitwise the same.
        multiply: stands in for `F.linear`; then whoever does so computes the gradients, and nothing overlaps.

    Returns:
        (..., own outputs).
    """
    if group.size == 1:
        return multiply(x, weight, bias)
    dim = None if sequence_dim is None else sequence_dim % x.dim()
    watched = multiply is not F.linear or has_torch_function((x, weight)) or torch.is_autocast_enabled(x.device.type)
    if overlap and torch.is_grad_enabled() and x.requires_grad and not watched:
        result: torch.Tensor = _ColumnLinear.apply(x, weight, bias, group, dim)  # type: ignore[no-untyped-call]
        return result
    whole = copy_to_ranks(x, group) if dim is None else gather_shared(x, dim, group)
    return multiply(whole, weight, bias)


class _ColumnLinear(torch.autograd.Function):
    """Gather and multiply; backward the gradient of x first, which travels while the weight's is computed.

    Of a shared-out x only this rank's part is kept; it is gathered again while the gradient of x is computed.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: Transport, dim: int | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.dim = group, dim
        return F.linear(x if dim is None else start_all_gather(x, dim, group).land(), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        group, dim = ctx.group, ctx.dim
        trained = ctx.needs_input_grad[1]
        again = start_all_gather(x, dim, group) if trained and dim is not None else None
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_x = rows.mm(weight).view(*gradient.shape[:-1], weight.shape[1])
        whole = x if again is None else again.land()
        flight = start_all_reduce(of_x, 0, group) if dim is None else start_reduce_scatter(of_x, dim, group)
        of_weight = rows.t().mm(whole.reshape(-1, whole.shape[-1])) if trained else None
        of_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return flight.land(), of_weight, of_bias, None, None


def row_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: Transport,
    *,
    sequence_dim: int | None = None,
    multiply: Multiply = F.linear,
) -> torch.Tensor:
    """``F.linear(x, weight, bias)`` where each rank has other columns of the weight, and those features of x.

    Args:
        x: (..., own inputs).
        weight: (outputs, own inputs).
        bias: (outputs,), the same on every rank. With a ``sequence_dim`` each rank finds its part of the gradient.
        group: the ranks, which sum their results.
        sequence_dim: the dimension of the result of which each rank gets its part; None: each gets the whole.
        multiply: stands in for `F.linear`.

    Returns:
        (..., outputs), or this rank's part of it along ``sequence_dim``.
    """
    if group.size == 1:
        return multiply(x, weight, bias)
    part = multiply(x, weight, None)
    total = all_reduce(part, group) if sequence_dim is None else reduce_scatter(part, sequence_dim, group)
    return total if bias is None else total + bias


class _ParallelLinear(Linear):
    """What both kinds have in common: the parameters are shards that know their whole."""

    multiply = staticmethod(F.linear)  # so the engine may put weight gradients off

    def __init__(
        self,
        inputs: int,
        outputs: int,
        weight: Shard,
        bias: Shard | None,
        group: Transport,
        *,
        has_bias: bool,
        std: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        self._shards = {"weight": weight, "bias": bias}
        self._like: tuple[nn.Module, ...] = ()
        super().__init__(inputs, outputs, bias=has_bias, std=std, device=device, dtype=dtype)
        self.group = group

    def reset_parameters(self) -> None:
        """Draw new weights from torch's global generator, which must be in the same state on every rank."""
        for name, shard in self._shards.items():
            parameter = getattr(self, name)
            if shard is not None and parameter is not None:
                set_shard(parameter, shard)
        super().reset_parameters()

    def init_parameters(self, seed: int, prefix: str) -> None:
        """Fill weight and bias with the parts of what the whole layer would get."""
        if self._like:
            fill_like(self, self._like[0], seed, prefix)
        else:
            super().init_parameters(seed, prefix)

    def adopt(self, linear: nn.Module, tied: Tied | None = None) -> None:
        """Become a part of this whole layer: take its parameters' parts, or without values what they are to be."""
        if isinstance(linear, Linear):
            self.std = linear.std
        else:
            self._like = template(linear)
        for name, shard in self._shards.items():
            parameter = getattr(linear, name)
            if parameter is not None and shard is not None:
                setattr(self, name, sharded_parameter(parameter, shard, tied))
            elif parameter is not None:
                if is_partial(getattr(self, name)):
                    mark_partial(parameter)
                setattr(self, name, parameter)
        self.train(linear.training)


class ColumnParallelLinear(_ParallelLinear):
    """``x @ weight.T + bias``, of which each rank computes some of the features.

    Communication, for x of S bytes whole: forward nothing, or with a ``sequence_dim`` an all-gather of S. Backward an
    all-reduce of S that travels while the weight's gradient is computed; with a ``sequence_dim`` an all-gather and a
    reduce-scatter of S each. With ``gather_output`` also an all-gather of the result's bytes forward.

    Where the weight's gradient is put off to the second half of a backward, x is not gathered a second time.

    Args:
        inputs: size of the last dimension of x.
        outputs: size of the last dimension of the whole result.
        group: the ranks; None for one alone.
        pieces: (rows, units) of each part of a fused projection; see `pipert.layers.shard.Shard`.
        bias: whether there is a bias.
        std: standard deviation of the initial weights.
        sequence_dim: the dimension of x that is shared out among the ranks; None: every rank has the whole x.
        gather_output: give the whole result on every rank.
        overlap: whether communication and computation overlap in the backward.
        device: where the parameters live.
        dtype: dtype of the parameters.

    Raises:
        ConfigError: the features cannot be shared out among so many ranks.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        group: Transport | None = None,
        pieces: Sequence[tuple[int, int]] = (),
        bias: bool = True,
        std: float = 0.02,
        sequence_dim: int | None = None,
        gather_output: bool = False,
        overlap: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        group = group or SingleTransport()
        rows = Shard((outputs, inputs), 0, group.size, group.rank, tuple(pieces))
        of_bias = Shard((outputs,), 0, group.size, group.rank, rows.pieces)
        super().__init__(inputs, rows.size, rows, of_bias, group, has_bias=bias, std=std, device=device, dtype=dtype)
        self.sequence_dim, self.gather_output, self.overlap = sequence_dim, gather_output, overlap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (..., inputs) to (..., own outputs), or to (..., outputs) with ``gather_output``."""
        y = column_linear(
            x,
            self.weight,
            self.bias,
            self.group,
            sequence_dim=self.sequence_dim,
            overlap=self.overlap,
            multiply=self.multiply,
        )
        return all_gather(y, -1, self.group) if self.gather_output else y


class RowParallelLinear(_ParallelLinear):
    """``x @ weight.T + bias``, of which each rank computes a part of every sum, from its own features of x.

    Communication, for a result of S bytes whole: forward an all-reduce of S; backward nothing. With a ``sequence_dim``
    forward a reduce-scatter and backward an all-gather of S. With ``scatter_input`` also, backward, an all-gather of
    the bytes of the whole x.

    Args:
        inputs: size of the last dimension of the whole x.
        outputs: size of the last dimension of the result.
        group: the ranks; None for one alone.
        units: between which of the inputs may be cut: the number of heads, say; default anywhere.
        bias: whether there is a bias; every rank has it whole, and it is added once.
        std: standard deviation of the initial weights.
        sequence_dim: the dimension of the result that is shared out among the ranks; None: all get the whole.
        scatter_input: x is whole on every rank, which takes its own features of it.
        device: where the parameters live.
        dtype: dtype of the parameters.

    Raises:
        ConfigError: the features cannot be shared out among so many ranks.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        group: Transport | None = None,
        units: int | None = None,
        bias: bool = True,
        std: float = 0.02,
        sequence_dim: int | None = None,
        scatter_input: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        group = group or SingleTransport()
        columns = Shard((outputs, inputs), 1, group.size, group.rank, ((inputs, units or inputs),))
        super().__init__(
            columns.size, outputs, columns, None, group, has_bias=bias, std=std, device=device, dtype=dtype
        )
        self.sequence_dim, self.scatter_input = sequence_dim, scatter_input
        if sequence_dim is not None and bias and group.size > 1:
            mark_partial(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (..., own inputs), or (..., inputs) with ``scatter_input``, to (..., outputs)."""
        x = scatter(x, -1, self.group) if self.scatter_input else x
        return row_linear(x, self.weight, self.bias, self.group, sequence_dim=self.sequence_dim, multiply=self.multiply)


def column_row_pair(
    inputs: int,
    inner: int,
    outputs: int,
    *,
    pieces: Sequence[tuple[int, int]],
    units: int | None = None,
    group: Transport | None,
    bias: bool,
    std: float,
    out_std: float,
    sequence_dim: int | None,
    overlap: bool,
    device: torch.device | str | None,
) -> tuple[ColumnParallelLinear, RowParallelLinear]:
    """Two layers around something that each rank does with its own features, so that nothing travels between them.

    Args:
        inputs: size of the last dimension of the first one's input.
        inner: size of the last dimension of the second one's whole input.
        outputs: size of the last dimension of its result.
        pieces: of the first one's features, as for `ColumnParallelLinear`; all of them together.
        units: of ``inner``, as for `RowParallelLinear`.
        group: the ranks; None for one alone.
        bias: whether the layers have biases.
        std: of the first one's initial weights.
        out_std: of the second one's.
        sequence_dim: the dimension of input and result that is shared out among the ranks; None: every rank has all.
        overlap: whether communication and computation overlap in the first one's backward.
        device: where the parameters live.
    """
    first = ColumnParallelLinear(
        inputs,
        sum(size for size, _ in pieces),
        pieces=pieces,
        group=group,
        bias=bias,
        std=std,
        sequence_dim=sequence_dim,
        overlap=overlap,
        device=device,
    )
    second = RowParallelLinear(
        inner,
        outputs,
        units=units,
        group=group,
        bias=bias,
        std=out_std,
        sequence_dim=sequence_dim,
        device=device,
    )
    return first, second
