"""A copy of a block to run and throw away."""

from __future__ import annotations

import copy
import types
from typing import Any

import torch
from torch import fx, nn

from pipert.errors import GraphError

_COPIED = (nn.Module, torch.Tensor, torch.Generator, fx.Graph, dict, list, tuple, set, types.MethodType)

KEPT = "_pipert_kept_"
"""How the attributes of parameters begin that copies of them have, too."""


def spare(name: str, module: nn.Module) -> nn.Module:
    """Copy a block deeply: its modules, tensors, generators and containers. Other objects it holds are shared.

    Communicators, meshes, configurations and the like cannot or need not be copied. Gradients and tensor hooks are not
    copied. Parameters on meta stay on meta.

    Raises:
        GraphError: something in the block resists copying.
    """
    memo: dict[int, Any] = {}
    for part in module.modules():
        for value in part.__dict__.values():
            if not isinstance(value, _COPIED):
                memo[id(value)] = value
            elif isinstance(value, torch.Generator):
                memo[id(value)] = value.clone_state()
            elif isinstance(value, torch.Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    try:
        made = copy.deepcopy(module, memo)
    except Exception as error:
        raise GraphError(
            f"block {name} ({type(module).__name__}) cannot be copied to be measured: {error}; use estimate(graph), or "
            "keep what resists copy.deepcopy out of the block"
        ) from error
    keep_attributes(module, made)
    return made


def keep_attributes(module: nn.Module, made: nn.Module) -> None:
    """Give the parameters of a deep copy the originals' attributes that begin with `KEPT`; torch forgets them."""
    for original, copied in zip(module.parameters(), made.parameters(), strict=True):
        for name, value in original.__dict__.items():
            if name.startswith(KEPT):
                setattr(copied, name, value)
