"""Sums of gradients over ranks: over data-parallel replicas, and over the copies of a tied weight.

Only what this step adds is summed. Gradients that were there before are set aside and added to afterwards, neither
scaled nor summed a second time. Without replicas, ties and a loss scale autograd adds to them directly.

What a step adds is divided by its loss scale here, so that ``.grad`` is always the gradient itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from pipert.comm.transport import Request, Transport
from pipert.engine.partial import sum_partial
from pipert.optim.flat import buckets_of
from pipert.optim.precision import accumulates_in


class GradientSum:
    """Sums the gradients of some parameters over the ranks of a transport, once a step.

    The parameters travel in flat buckets, of one dtype each, which afterwards are the gradients' memory. A parameter
    that no rank has a gradient for stays without one.

    Args:
        parameters: the same ones, in the same order, on every rank.
        transport: the ranks that sum; all call `start` in the same order.
        tensor: the tensor-parallel ranks, which sum first where each has a part of a gradient
            (`pipert.layers.shard.is_summed`).

    Attributes:
        transport: the same; on it the requests are waited for.
        parameters: the same.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], transport: Transport, tensor: Transport | None = None
    ) -> None:
        self.transport = transport
        self._tensor = tensor
        self.parameters = tuple(parameters)
        self._scale = 1.0
        self._buckets = [_Bucket(bucket, transport) for bucket in _buckets(parameters)]

    def begin(self, scale: float = 1.0) -> None:
        """Before the first backward, of a loss times ``scale``: set the present gradients aside."""
        self._scale = scale
        for bucket in self._buckets:
            bucket.begin()

    def start(self) -> list[Request]:
        """After the last backward: start summing."""
        if self._tensor is not None:
            sum_partial(self.parameters, self._tensor)
        return [bucket.start() for bucket in self._buckets]

    def finish(self) -> None:
        """When all requests are complete: set the gradients."""
        for bucket in self._buckets:
            bucket.finish(self._scale)


def _buckets(parameters: Sequence[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """Parameters of one dtype and device, in order."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        by_kind.setdefault((accumulates_in(parameter), parameter.device), []).append(parameter)
    for same in by_kind.values():
        yield from buckets_of(same, _nbytes)


def _nbytes(parameter: torch.nn.Parameter) -> int:
    return parameter.numel() * accumulates_in(parameter).itemsize


class _Bucket:
    """Parameters whose gradients travel together."""

    def __init__(self, parameters: list[torch.nn.Parameter], transport: Transport) -> None:
        self._parameters = parameters
        self._transport = transport
        self._before: list[torch.Tensor | None] = []
        self._flat = torch.empty(0)

    def begin(self) -> None:
        self._before = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def start(self) -> Request:
        """Behind the gradients the flat tensor says, for each parameter, how many ranks have one."""
        parts, used = [], []
        for parameter in self._parameters:
            gradient, parameter.grad = parameter.grad, None
            used.append(0.0 if gradient is None else 1.0)
            gradient = torch.zeros_like(parameter, dtype=accumulates_in(parameter)) if gradient is None else gradient
            parts.append((gradient.to_dense() if gradient.is_sparse else gradient).detach().reshape(-1))
        first = parts[0]
        self._flat = torch.cat([*parts, torch.tensor(used, dtype=first.dtype, device=first.device)])
        return self._transport.iallreduce(self._flat)

    def finish(self, scale: float) -> None:
        sizes = [parameter.numel() for parameter in self._parameters]
        *parts, used = torch.split(self._flat, [*sizes, len(sizes)])
        if scale != 1.0:
            self._flat[: sum(sizes)].mul_(1.0 / scale)
        for parameter, before, part, ranks in zip(self._parameters, self._before, parts, used.tolist(), strict=True):
            if not ranks:
                parameter.grad = before
            elif before is None:
                parameter.grad = part.view_as(parameter)
            else:
                parameter.grad = before.add_(part.view_as(parameter))
        self._before, self._flat = [], torch.empty(0)


class Unscaling:
    """Within it gradients come from a loss times ``scale``; afterwards what was added is divided by it.

    Args:
        parameters: those that no `GradientSum` takes care of.
        scale: the loss scale; with 1 nothing happens.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], scale: float) -> None:
        self._parameters = parameters if scale != 1.0 else ()
        self._scale = scale
        self._before: list[torch.Tensor | None] = []

    def __enter__(self) -> None:
        self._before = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def __exit__(self, *_: object) -> None:
        for parameter, before in zip(self._parameters, self._before, strict=True):
            added = parameter.grad
            if added is not None:
                added.mul_(1.0 / self._scale)
            parameter.grad = added if before is None else before if added is None else before.add_(added)
