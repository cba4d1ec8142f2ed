"""Collectives with gradients, along a dimension of tensors, over the ranks of a `Transport`.

    function          forward           backward          bytes of each collective
    copy_to_ranks     nothing           all-reduce        the tensor's
    all_reduce        all-reduce        nothing           the tensor's
    all_gather        all-gather        own part          the whole's
    gather_shared     all-gather        reduce-scatter    the whole's
    scatter           own part          all-gather        the whole's
    reduce_scatter    reduce-scatter    all-gather        the whole's

Bytes are those that a transport counts: of the larger tensor. Of S bytes an all-reduce sends 2 S (t - 1) / t from each
of t ranks, a gather or reduce-scatter half of that.

The pairs are each other's transposes if every rank goes on to compute the *same* loss from tensors that are whole, and
its own part from those that are not: no gradient is counted twice. Sums are bitwise the same on every rank. In a group
of one rank every function gives its argument back, and on the meta device nothing travels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pipert.comm.transport import Request, Transport
from pipert.errors import ConfigError
from pipert.randomness import letting_go


class Flight:
    """A collective under way.

    Args:
        group: whose.
        request: what it was started as; None where there is nothing to wait for.
        doing: its name, for reports.
        result: makes the result when it is complete.
    """

    def __init__(
        self, group: Transport, request: Request | None, doing: str, result: Callable[[], torch.Tensor]
    ) -> None:
        self._group, self._request, self._doing, self._result = group, request, doing, result

    def land(self) -> torch.Tensor:
        """Wait for the result."""
        if self._request is not None:
            with letting_go():
                self._group.wait(self._request, self._doing)
        return self._result()


Start = Callable[[torch.Tensor, int, Transport], Flight]


def start_all_reduce(x: torch.Tensor, dim: int, group: Transport) -> Flight:
    """Start summing a tensor over the ranks; ``dim`` does not matter."""
    total = x.detach().clone(memory_format=torch.contiguous_format)
    request = None if x.is_meta else group.iallreduce(total)
    return Flight(group, request, "a tensor-parallel all-reduce", lambda: total)


def start_all_gather(x: torch.Tensor, dim: int, group: Transport) -> Flight:
    """Start putting the ranks' tensors together along ``dim``."""
    own = x.detach().contiguous()
    rows = own.new_empty(group.size, *own.shape)
    request = None if x.is_meta else group.iallgather(rows, own)

    def result() -> torch.Tensor:
        return rows.movedim(0, dim).reshape(*x.shape[:dim], group.size * x.shape[dim], *x.shape[dim + 1 :])

    return Flight(group, request, "a tensor-parallel all-gather", result)


def start_reduce_scatter(x: torch.Tensor, dim: int, group: Transport) -> Flight:
    """Start summing a tensor over the ranks, of which each gets its part along ``dim``."""
    size = _share(x, dim, group)
    rows = x.detach().reshape(*x.shape[:dim], group.size, size, *x.shape[dim + 1 :]).movedim(dim, 0).contiguous()
    part = torch.empty_like(rows[0])
    request = None if x.is_meta else group.ireduce_scatter(part, rows)
    return Flight(group, request, "a tensor-parallel reduce-scatter", lambda: part)


def _start_part(x: torch.Tensor, dim: int, group: Transport) -> Flight:
    return Flight(group, None, "", lambda: own_part(x, dim, group).clone())


def _start_nothing(x: torch.Tensor, dim: int, group: Transport) -> Flight:
    return Flight(group, None, "", lambda: x.view_as(x))


def own_part(x: torch.Tensor, dim: int, group: Transport) -> torch.Tensor:
    """This rank's part of a tensor along ``dim``, a view; not differentiated over the ranks."""
    size = _share(x, dim, group)
    return x.narrow(dim, group.rank * size, size)


def _share(x: torch.Tensor, dim: int, group: Transport) -> int:
    if x.shape[dim] % group.size:
        raise ConfigError(
            f"dimension {dim} of shape {tuple(x.shape)} cannot be split among {group.size} tensor-parallel ranks: "
            f"{x.shape[dim]} / {group.size} leaves {x.shape[dim] % group.size} over; use a size that tp divides"
        )
    return x.shape[dim] // group.size


class _Exchange(torch.autograd.Function):
    """One collective forward, another one backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Start, back: Start, dim: int, group: Transport) -> torch.Tensor:
        ctx.back, ctx.dim, ctx.group = back, dim, group
        return there(x, dim, group).land()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.back(gradient, ctx.dim, ctx.group).land(), None, None, None, None


def _exchange(x: torch.Tensor, there: Start, back: Start, dim: int, group: Transport) -> torch.Tensor:
    if group.size == 1:
        return x
    result: torch.Tensor = _Exchange.apply(x, there, back, dim % x.dim(), group)  # type: ignore[no-untyped-call]
    return result


def copy_to_ranks(x: torch.Tensor, group: Transport) -> torch.Tensor:
    """A tensor that all ranks have, for each to use differently; backward: one all-reduce of its bytes."""
    return _exchange(x, _start_nothing, start_all_reduce, 0, group)


def all_reduce(x: torch.Tensor, group: Transport) -> torch.Tensor:
    """The sum over the ranks, on all of them: one all-reduce of its bytes; backward: nothing."""
    return _exchange(x, start_all_reduce, _start_nothing, 0, group)


def all_gather(x: torch.Tensor, dim: int, group: Transport) -> torch.Tensor:
    """The ranks' tensors along ``dim``, for all to use *alike*: one all-gather of the whole; backward: nothing."""
    return _exchange(x, start_all_gather, _start_part, dim, group)


def gather_shared(x: torch.Tensor, dim: int, group: Transport) -> torch.Tensor:
    """The ranks' tensors along ``dim``, for each to use *differently*: an all-gather; backward: a reduce-scatter."""
    return _exchange(x, start_all_gather, start_reduce_scatter, dim, group)


def scatter(x: torch.Tensor, dim: int, group: Transport) -> torch.Tensor:
    """This rank's part along ``dim`` of a tensor that all have: no message; backward: one all-gather of the whole."""
    return _exchange(x, _start_part, start_all_gather, dim, group)


def reduce_scatter(x: torch.Tensor, dim: int, group: Transport) -> torch.Tensor:
    """This rank's part along ``dim`` of the sum over the ranks: a reduce-scatter; backward: an all-gather."""
    return _exchange(x, start_reduce_scatter, start_all_gather, dim, group)
