"""How long a block takes when its backward runs in two halves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from pipert.engine.deferred import Deferred, Products, deferring


class Halves(NamedTuple):
    """Seconds of a block's forward, and of its backward's first and second half."""

    forward: float
    first: float
    second: float


def run_halves(module: nn.Module, arguments: Sequence[Any]) -> Halves:
    """Run a block, which adds to its parameters' gradients.

    Args:
        module: the block.
        arguments: of its call; a gradient flows back through some of them.
    """
    deferred, products = Deferred(), Products(module)
    marks = [_now(arguments)]
    with deferring(deferred, products):
        result = module(*arguments)
    ends = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    marks.append(_now(ends))
    deferred.first_half(ends, [torch.ones_like(end) for end in ends])
    marks.append(_now(ends))
    deferred.accumulate()
    marks.append(_now(ends))
    return Halves(*(after - before for before, after in pairwise(marks)))


def _now(values: Sequence[Any]) -> float:
    if any(isinstance(value, torch.Tensor) and value.is_cuda for value in values):
        torch.cuda.synchronize()
    return perf_counter()
