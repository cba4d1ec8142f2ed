"""Bias, dropout and residual in one pass, with masks that are a function of (key of the sample, element)."""

from __future__ import annotations

from typing import Any

import torch

from pipert.hipkernels.errors import KernelInputError
from pipert.hipkernels.ops.operator import define, once_only
from pipert.hipkernels.ops.tensors import column_vector, floats, parts, result, rows_of, same_shape
from pipert.hipkernels.reference import dropout as reference
from pipert.hipkernels.runtime import DTYPES, library_for, library_that_sums


def bias_dropout_add(
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    p: float,
    keys: torch.Tensor,
    offset: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``residual + dropout(x + bias)``; the mask is computed again in the backward pass, never stored.

    Element e of a sample is kept if word ``e % 4`` of Philox4x32-10(key, e // 4) is at least ``p * 2**32``. So masks
    are the same in every layout, on every device and under recompute.

    Args:
        x: shape (samples, ..., columns); fp32, bf16 or fp16 (fp64 by the torch reference).
        bias: shape (columns,), any floating-point dtype.
        residual: like x.
        p: probability of dropping an element, 0 to 1; the kept ones are divided by ``1 - p``.
        keys: int64, shape (samples,), on the device of x.
        offset: number of the first element of each sample here, for samples cut along their second dimension.
        out: memory for the result, without gradients; may be x or residual.

    Raises:
        KernelInputError: an argument does not fit the others.
    """
    rows_of(x, "bias_dropout_add")
    same_shape("bias_dropout_add", x, residual=residual)
    column_vector("bias_dropout_add", x, bias=bias)
    if not 0.0 <= p <= 1.0 or not 0 <= offset < 2**62:
        raise KernelInputError(f"bias_dropout_add: p={p}, offset={offset}; p is a probability, offset in [0, 2**62)")
    if keys.dtype != torch.int64 or keys.shape != x.shape[:1] or keys.device != x.device or x.dim() < 2:
        raise KernelInputError(
            f"bias_dropout_add: keys are {keys.dtype} {tuple(keys.shape)} on {keys.device} for an input of shape "
            f"{tuple(x.shape)} on {x.device}; they must be int64, one for each row of dimension 0"
        )
    if out is not None:
        return _dropout(x.detach(), bias, residual, keys, p, offset, out)
    return dropout_op(x, bias, residual, keys, p, offset)  # type: ignore[no-any-return]


def _numbers(p: float) -> tuple[int, float]:
    """Threshold of the random words, and what kept elements are multiplied by."""
    return min(round(p * 2**32), 2**32 - 1), 0.0 if p == 1.0 else 1.0 / (1.0 - p)


def _dropout(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    keys: torch.Tensor,
    p: float,
    offset: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    library = library_for(x)
    if library is None:
        y = reference.dropout_forward(x, bias, residual, keys, offset, *_numbers(p))
        return y if out is None else result(out, x, "bias_dropout_add").copy_(y)
    y = result(out, x, "bias_dropout_add", (x, bias, residual))
    rows, columns = rows_of(x, "bias_dropout_add")
    sizes = rows, columns, max(rows // max(len(keys), 1), 1), offset
    residual = None if residual is None else residual.contiguous()
    inputs = x.contiguous(), floats(bias), residual, keys.contiguous()
    library.run("dropout_forward", y, *inputs, *sizes, *_numbers(p), DTYPES[x.dtype])
    return y


def _backward(
    dy: torch.Tensor, bias: torch.Tensor, keys: torch.Tensor, p: float, offset: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = rows_of(dy, "bias_dropout_add")
    library = library_that_sums(columns, dy)
    if library is None:
        dx = _dropout(dy, None, None, keys, p, offset)
        return dx, dx.reshape(-1, columns).sum(0, dtype=torch.promote_types(dx.dtype, torch.float32)).to(bias.dtype)
    dx = torch.empty(dy.shape, dtype=dy.dtype, device=dy.device)
    count = parts(dy, rows)
    sums, workspace = (dy.new_empty(n, columns, dtype=torch.float32) for n in (1, count))
    sizes = rows, columns, max(rows // max(len(keys), 1), 1), offset
    inputs = dy.contiguous(), keys.contiguous()
    library.run("dropout_backward", dx, sums, workspace, count, *inputs, *sizes, *_numbers(p), DTYPES[dy.dtype])
    return dx, sums[0].to(bias.dtype, copy=True)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    _, bias, residual, keys, ctx.p, ctx.offset = inputs
    ctx.has_residual = residual is not None
    ctx.save_for_backward(bias, keys)


def _gradients(ctx: Any, dy: Any) -> tuple[Any, ...]:
    bias, keys = ctx.saved_tensors
    if bias is None:
        dx, dbias = dropout_op(dy, None, None, keys, ctx.p, ctx.offset), None
    else:
        dx, dbias = backward_op(dy, bias, keys, ctx.p, ctx.offset)
    return dx, dbias, dy if ctx.has_residual else None, None, None, None


backward_op = define(
    "dropout_backward(Tensor dy, Tensor bias, Tensor keys, float p, int offset) -> (Tensor, Tensor)",
    _backward,
    lambda dy, bias, keys, p, offset: (dy.new_empty(dy.shape), bias.new_empty(bias.shape)),
    once_only,
)
dropout_op = define(
    "dropout(Tensor x, Tensor? bias, Tensor? residual, Tensor keys, float p, int offset) -> Tensor",
    _dropout,
    lambda x, *rest: x.new_empty(x.shape),
    _gradients,
    _save,
)
