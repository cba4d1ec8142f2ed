"""Stages that sleep instead of computing, so that many ranks are honest on few cores."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

#: Numbers in a row of what is handed over.
WIDTH = 64


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradients[0] * 1.0, torch.zeros(1), None, None


class SleepStage(nn.Module):
    """The identity, with one weight, that takes its time.

    Args:
        forward: seconds of a forward.
        backward: seconds of a backward.
    """

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self._seconds = forward, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(x, self.weight, *self._seconds)  # type: ignore[no-any-return,no-untyped-call]


class SplitSleep(nn.Module):
    """Two small products by one weight, whose forward, input gradient and weight gradient take their time.

    Args:
        forward: seconds of a forward.
        inputs: seconds of the gradient of the input.
        weights: seconds of the gradient of the weight, wherever it is added up.
    """

    multiply = staticmethod(F.linear)

    def __init__(self, forward: float, inputs: float, weights: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self._seconds = forward, inputs
        self._node = get_gradient_edge(self.weight).node
        self._node.register_prehook(lambda gradients: time.sleep(weights * (gradients[0] is not None)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Twice: the sum of two products is autograd's, wherever it is made, and its node for the weight sleeps.
        product = self.multiply(self.multiply(x, self.weight), self.weight)
        return _Sleep.apply(product, torch.ones(1), *self._seconds)  # type: ignore[no-any-return,no-untyped-call]


class Identity(nn.Module):
    """One multiplication by one weight: next to nothing, so that what is left is the runtime's own cost."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def mean_difference(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that costs nothing."""
    return (output - target).mean()
