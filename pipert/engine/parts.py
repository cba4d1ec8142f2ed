"""Parts of gradients that are put off, and what becomes of them: they are added to a parameter's ``.grad``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from pipert.engine.backward import run_backward
from pipert.engine.fused import add_product


class Product(NamedTuple):
    """A weight's gradient to be: two matrices of as many rows; the gradient is ``gradient.T @ value``."""

    value: torch.Tensor
    gradient: torch.Tensor

    def compute(self) -> torch.Tensor:
        """Multiply."""
        return self.gradient.t().mm(self.value)


class Sum(NamedTuple):
    """A bias's gradient to be: its output's, summed over all dimensions but the last."""

    gradient: torch.Tensor

    def compute(self) -> torch.Tensor:
        """Add up."""
        return self.gradient.sum_to_size(self.gradient.shape[-1:])


class Ready(NamedTuple):
    """A gradient that is there already: what autograd found for a weight that is also used in other ways."""

    gradient: torch.Tensor

    def compute(self) -> torch.Tensor:
        """Nothing to do."""
        return self.gradient


Part = Product | Sum | Ready


def own_leaf(tensor: torch.Tensor) -> bool:
    """A leaf without hooks, which would see gradients in the first half that are not there yet."""
    return (
        tensor.requires_grad
        and tensor.is_leaf
        and not tensor._backward_hooks
        and not tensor._post_accumulate_grad_hooks
    )


def add_parts(parameter: torch.Tensor, parts: Sequence[Part]) -> None:
    """Compute the parts of one micro-batch's gradient and add them to ``.grad`` as autograd would.

    Args:
        parameter: whose.
        parts: in autograd's order.
    """
    before, first = parameter.grad, parts[0]
    if len(parts) > 1 or not own_leaf(parameter):
        _by_autograd(parameter, parts)
    elif before is not None and isinstance(first, Product) and _alike(parameter, before, first.gradient):
        add_product(before, first.gradient.t(), first.value)
    else:
        _add_one(parameter, before, first)


def _alike(*tensors: torch.Tensor) -> bool:
    return all(t.dtype is tensors[0].dtype and t.layout is torch.strided for t in tensors)


def _add_one(parameter: torch.Tensor, before: torch.Tensor | None, part: Part) -> None:
    gradient = _computed(part, parameter)
    wanted = parameter.grad_dtype if before is None else before.dtype
    if gradient.layout is not torch.strided or gradient.dtype is not wanted:
        run_backward([parameter], [gradient])
    elif before is None:  # taken; autograd's engine would copy it
        parameter.grad = gradient
    else:
        before.add_(gradient)


def _by_autograd(parameter: torch.Tensor, parts: Sequence[Part]) -> None:
    run_backward([parameter] * len(parts), [_computed(part, parameter) for part in parts])


def _computed(part: Part, parameter: torch.Tensor) -> torch.Tensor:
    gradient = part.compute()
    # What autograd found may be in a wider type.
    return gradient if isinstance(part, Ready) else gradient.to(parameter.dtype)
