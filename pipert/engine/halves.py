"""How long the second half of a block's backward takes."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from pipert.engine.deferred import Deferred, Products, deferring


def second_half(module: nn.Module, arguments: Sequence[Any]) -> float:
    """Run a block, which may be spoilt, and its backward in two halves; the seconds of the second one.

    Args:
        module: the block.
        arguments: of its call; a gradient flows back through some of them.
    """
    deferred = Deferred()
    with deferring(deferred, Products(module)):
        result = module(*arguments)
    ends = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    deferred.first_half(ends, [torch.ones_like(end) for end in ends])
    start = _now(ends)
    deferred.accumulate()
    return _now(ends) - start


def _now(tensors: Sequence[torch.Tensor]) -> float:
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.synchronize()
    return perf_counter()
