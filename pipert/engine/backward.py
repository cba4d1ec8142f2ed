"""autograd's engine, without what is checked around it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward


def run_backward(roots: Sequence[torch.Tensor | GradientEdge], seeds: Sequence[torch.Tensor]) -> None:
    """``torch.autograd.backward`` without its checks, which take as long as a small layer.

    It is a torch function itself, too: a mode would be off while it runs, and a forward that is run again within it
    would not be the same.
    """
    _engine_run_backward(tuple(roots), tuple(seeds), False, False, (), allow_unreachable=True, accumulate_grad=True)
