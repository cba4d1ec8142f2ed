"""GELU with a bias, and SwiGLU."""

from __future__ import annotations

from typing import Any

import torch

from pipert.hipkernels.errors import KernelInputError
from pipert.hipkernels.ops.operator import define, once_only
from pipert.hipkernels.ops.tensors import column_vector, floats, parts, result, rows_of
from pipert.hipkernels.reference import activation as reference
from pipert.hipkernels.runtime import DTYPES, library_for, library_that_sums


def bias_gelu(
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    approximate: str = "none",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``gelu(x + bias)`` (Hendrycks and Gimpel 2016).

    Args:
        x: any shape, at least one dimension; fp32, bf16 or fp16 (fp64 and others by the torch reference).
        bias: shape (columns,), any floating-point dtype.
        approximate: ``none`` (erf) or ``tanh``, as in torch.
        out: memory for the result, without gradients; may be x.

    Returns:
        like x, in its dtype.

    Raises:
        KernelInputError: an argument does not fit the others.
    """
    if approximate not in ("none", "tanh"):
        raise KernelInputError(f"bias_gelu: approximate={approximate!r} is neither 'none' nor 'tanh'")
    rows_of(x, "bias_gelu")
    column_vector("bias_gelu", x, bias=bias)
    if out is not None:
        return _gelu(x.detach(), bias, approximate == "tanh", out)
    return gelu_op(x, bias, approximate == "tanh")  # type: ignore[no-any-return]


def swiglu(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """``silu(gate) * up`` (Shazeer 2020), gate and up the halves of the last dimension of x.

    Args:
        x: shape (..., 2 * columns); fp32, bf16 or fp16 (fp64 and others by the torch reference).
        out: memory for the result, without gradients.

    Returns:
        shape (..., columns), in the dtype of x.

    Raises:
        KernelInputError: the last dimension is odd or empty, or out does not fit.
    """
    _, columns = rows_of(x, "swiglu")
    if columns % 2:
        raise KernelInputError(f"swiglu: last dimension {columns} is odd; it holds the gate and then as many of up")
    return _swiglu(x.detach(), out) if out is not None else swiglu_op(x)


def _gelu(x: torch.Tensor, bias: torch.Tensor | None, tanh: bool, out: torch.Tensor | None = None) -> torch.Tensor:
    library = library_for(x)
    if library is None:
        y = reference.gelu_forward(x, bias, tanh)
        return y if out is None else result(out, x, "bias_gelu").copy_(y)
    x, y = x.contiguous(), result(out, x, "bias_gelu", (x, bias))
    library.run("gelu_forward", y, x, floats(bias), *rows_of(x, "bias_gelu"), tanh, DTYPES[x.dtype])
    return y


def _gelu_backward(
    dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, tanh: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = rows_of(x, "bias_gelu")
    library = library_for(dy, x) if bias is None else library_that_sums(columns, dy, x)
    if library is None:
        return reference.gelu_backward(dy, x, bias, tanh)
    dy, x = dy.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    count = parts(x, rows)
    sums = workspace = None
    if bias is not None:
        sums, workspace = (x.new_empty(n, columns, dtype=torch.float32) for n in (1, count))
    library.run("gelu_backward", dx, sums, workspace, count, dy, x, floats(bias), rows, columns, tanh, DTYPES[x.dtype])
    return dx, x.new_empty(0) if bias is None or sums is None else sums[0].to(bias.dtype)


def _gelu_save(ctx: Any, inputs: Any, output: Any) -> None:
    x, bias, ctx.tanh = inputs
    ctx.save_for_backward(x, bias)


def _gelu_gradients(ctx: Any, dy: Any) -> tuple[Any, ...]:
    x, bias = ctx.saved_tensors
    dx, dbias = gelu_backward_op(dy, x, bias, ctx.tanh)
    return dx, None if bias is None else dbias, None


def _swiglu(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    library = library_for(x)
    rows, columns = rows_of(x, "swiglu")
    like_y = x[..., : columns // 2]
    if library is None:
        y = reference.swiglu_forward(x)
        return y if out is None else result(out, like_y, "swiglu").copy_(y)
    y = result(out, like_y, "swiglu", (x,))
    library.run("swiglu_forward", y, x.contiguous(), rows, columns // 2, DTYPES[x.dtype])
    return y


def _swiglu_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    library = library_for(dy, x)
    if library is None:
        return reference.swiglu_backward(dy, x)
    x = x.contiguous()
    dx = torch.empty_like(x)
    rows, columns = rows_of(x, "swiglu")
    library.run("swiglu_backward", dx, dy.contiguous(), x, rows, columns // 2, DTYPES[x.dtype])
    return dx


def _swiglu_save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _swiglu_gradients(ctx: Any, dy: Any) -> Any:
    return swiglu_backward_op(dy, *ctx.saved_tensors)


gelu_backward_op = define(
    "gelu_backward(Tensor dy, Tensor x, Tensor? bias, bool tanh) -> (Tensor, Tensor)",
    _gelu_backward,
    lambda dy, x, bias, tanh: (x.new_empty(x.shape), x.new_empty(0) if bias is None else bias.new_empty(bias.shape)),
    once_only,
)
gelu_op = define(
    "gelu(Tensor x, Tensor? bias, bool tanh) -> Tensor",
    _gelu,
    lambda x, bias, tanh: x.new_empty(x.shape),
    _gelu_gradients,
    _gelu_save,
)
swiglu_backward_op = define(
    "swiglu_backward(Tensor dy, Tensor x) -> Tensor", _swiglu_backward, lambda dy, x: x.new_empty(x.shape), once_only
)
swiglu_op = define(
    "swiglu(Tensor x) -> Tensor",
    _swiglu,
    lambda x: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)),
    _swiglu_gradients,
    _swiglu_save,
)
