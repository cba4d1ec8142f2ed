"""Sums of gradients over ranks: over data-parallel replicas, and over the copies of a tied weight.

Only what this step adds is summed. Gradients that were there before are set aside and added to afterwards, neither
scaled nor summed a second time. Without replicas and ties there is nothing to sum, and autograd adds to them directly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from pipert.comm.transport import Request, Transport

BUCKET_BYTES = 25 * 2**20


class GradientSum:
    """Sums the gradients of some parameters over the ranks of a transport, once a step.

    The parameters travel in flat buckets, of one dtype each, which afterwards are the gradients' memory. A parameter
    that no rank has a gradient for stays without one.

    Args:
        parameters: the same ones, in the same order, on every rank.
        transport: the ranks that sum; all call `start` in the same order.

    Attributes:
        transport: the same; on it the requests are waited for.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], transport: Transport) -> None:
        self.transport = transport
        self._buckets = [_Bucket(bucket, transport) for bucket in _buckets(parameters)]

    def begin(self) -> None:
        """Before the first backward: set the present gradients aside."""
        for bucket in self._buckets:
            bucket.begin()

    def start(self) -> list[Request]:
        """After the last backward: start summing."""
        return [bucket.start() for bucket in self._buckets]

    def finish(self) -> None:
        """When all requests are complete: set the gradients."""
        for bucket in self._buckets:
            bucket.finish()


def _buckets(parameters: Sequence[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """Parameters of one dtype and device, up to `BUCKET_BYTES` together, in order."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        by_kind.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for same in by_kind.values():
        bucket: list[torch.nn.Parameter] = []
        for parameter in same:
            if bucket and sum(p.nbytes for p in bucket) + parameter.nbytes > BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(parameter)
        yield bucket


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
            gradient = torch.zeros_like(parameter) if gradient is None else gradient
            parts.append((gradient.to_dense() if gradient.is_sparse else gradient).detach().reshape(-1))
        first = parts[0]
        self._flat = torch.cat([*parts, torch.tensor(used, dtype=first.dtype, device=first.device)])
        return self._transport.iallreduce(self._flat)

    def finish(self) -> None:
        sizes = [parameter.numel() for parameter in self._parameters]
        *parts, used = torch.split(self._flat, [*sizes, len(sizes)])
        for parameter, before, part, ranks in zip(self._parameters, self._before, parts, used.tolist(), strict=True):
            if not ranks:
                parameter.grad = before
            elif before is None:
                parameter.grad = part.view_as(parameter)
            else:
                parameter.grad = before.add_(part.view_as(parameter))
        self._before, self._flat = [], torch.empty(0)
