"""Softmax of scaled scores with a mask, a causal one, or both."""

from __future__ import annotations

from typing import Any

import torch

from pipert.hipkernels.errors import KernelInputError
from pipert.hipkernels.ops.operator import define, once_only
from pipert.hipkernels.ops.tensors import result, rows_of
from pipert.hipkernels.reference import softmax as reference
from pipert.hipkernels.runtime import DTYPES, Address, library_for


def masked_softmax(
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``softmax(scale * x)`` over the last dimension, of the elements that the masks leave.

    For models that do not use torch's attention. Rows of which nothing is left are 0, and so are their gradients.

    Args:
        x: scores, shape (queries, columns) after at most two more dimensions; fp32, bf16 or fp16 (fp64 by the torch
            reference).
        mask: bool, broadcastable to x; true where an element takes part, as in torch's attention.
        scale: multiplies x.
        causal: query q sees columns up to ``q + columns - queries``.
        out: memory for the result, without gradients; may be x.

    Raises:
        KernelInputError: the shapes do not fit, or the mask is not bool.
    """
    if not 2 <= x.dim() <= 4:
        raise KernelInputError(f"masked_softmax: shape {tuple(x.shape)}; two to four dimensions are possible")
    rows_of(x, "masked_softmax")
    if mask is not None:
        fits = mask.dim() <= x.dim() and all(
            size in (1, whole) for size, whole in zip(reversed(mask.shape), reversed(x.shape), strict=False)
        )
        if mask.dtype != torch.bool or not fits or mask.device != x.device:
            raise KernelInputError(
                f"masked_softmax: the mask is {mask.dtype} {tuple(mask.shape)} on {mask.device}; "
                f"it must be bool, broadcastable to {tuple(x.shape)}, on {x.device}"
            )
    if out is not None:
        return _softmax(x.detach(), mask, scale, causal, out)
    return softmax_op(x, mask, scale, causal)  # type: ignore[no-any-return]


def _softmax(
    x: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool, out: torch.Tensor | None = None
) -> torch.Tensor:
    library = library_for(x)
    if library is None:
        y = reference.softmax_forward(x, mask, scale, causal)
        return y if out is None else result(out, x, "masked_softmax").copy_(y)
    y = result(out, x, "masked_softmax", (x,))
    shape = (1,) * (4 - x.dim()) + tuple(x.shape)
    strides: tuple[int, ...] = (0, 0, 0)
    where = None
    if mask is not None:
        mask = mask.expand(shape)
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        strides = mask.stride()[:3]
        where = Address(mask)
    if x.numel():
        numbers = (*shape, *strides, float(scale), causal)
        library.run("softmax_forward", y, x.contiguous(), where, *numbers, DTYPES[x.dtype])
    return y


def _backward(dy: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
    library = library_for(dy, y)
    if library is None:
        return reference.softmax_backward(dy, y, scale)
    dx = torch.empty_like(y)
    numbers = (*rows_of(y, "masked_softmax"), float(scale), DTYPES[y.dtype])
    library.run("softmax_backward", dx, dy.contiguous(), y, *numbers)
    return dx


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.scale = inputs[2]
    ctx.save_for_backward(output)


def _gradients(ctx: Any, dy: Any) -> tuple[Any, ...]:
    return backward_op(dy, *ctx.saved_tensors, ctx.scale), None, None, None


backward_op = define(
    "softmax_backward(Tensor dy, Tensor y, float scale) -> Tensor",
    _backward,
    lambda dy, y, scale: y.new_empty(y.shape),
    once_only,
)
softmax_op = define(
    "softmax(Tensor x, Tensor? mask, float scale, bool causal) -> Tensor",
    _softmax,
    lambda x, *rest: x.new_empty(x.shape),
    _gradients,
    _save,
)
