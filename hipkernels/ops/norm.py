"""LayerNorm and RMSNorm over the last dimension, with the addition of a residual and all gradients in one pass."""

from __future__ import annotations

from typing import Any

import torch

from pipert.hipkernels.ops.operator import define, once_only
from pipert.hipkernels.ops.tensors import column_vector, floats, parts, result, rows_of, same_shape
from pipert.hipkernels.reference import norm as reference
from pipert.hipkernels.runtime import DTYPES, library_for, library_that_sums

Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over the last dimension (Ba et al. 2016).

    Args:
        x: any shape, at least one dimension; fp32, bf16 or fp16 (fp64 and others by the torch reference).
        weight: shape (columns,), any floating-point dtype; default ones.
        bias: likewise; default none.
        eps: added to the variance.
        out: memory for the result, without gradients; may be x.

    Returns:
        like x, in its dtype; statistics and products are computed in fp32.

    Raises:
        KernelInputError: shapes, dtypes or devices do not go together.
    """
    return _norm(x, None, weight, bias, eps, True, out)[0]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-5, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``x / sqrt(mean(x**2) + eps) * weight`` (Zhang and Sennrich 2019); arguments as in `layer_norm`."""
    return _norm(x, None, weight, None, eps, False, out)[0]


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(layer_norm(h), h)`` for ``h = x + residual``, which are alike; other arguments as in `layer_norm`."""
    return _norm(x, residual, weight, bias, eps, True, None)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(rms_norm(h), h)`` for ``h = x + residual``, which are alike; other arguments as in `layer_norm`."""
    return _norm(x, residual, weight, None, eps, False, None)


def _norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    centred: bool,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows_of(x, "norm")
    same_shape("norm", x, residual=residual)
    column_vector("norm", x, weight=weight, bias=bias)
    if weight is None:
        weight = torch.ones(x.shape[-1], device=x.device)
    if out is not None:
        y, h = _forward(x.detach(), residual, weight.detach(), bias, eps, centred, out)[:2]
    else:
        y, h = forward_op(x, residual, weight, bias, eps, centred)[:2]
    return y, h


def _forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    centred: bool,
    out: torch.Tensor | None = None,
) -> Four:
    library = library_for(x)
    if library is None:
        four = reference.norm_forward(x, residual, weight, bias, eps, centred)
        return four if out is None else (result(out, x, "norm").copy_(four[0]), *four[1:])
    rows, columns = rows_of(x, "norm")
    x, y = x.contiguous(), result(out, x, "norm", (x, weight, bias))
    if residual is not None:
        residual = residual.contiguous()
    h = x.new_empty(0) if residual is None else torch.empty_like(x)
    mean, rstd = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
    vectors = floats(weight), floats(bias)
    library.run("norm_forward", y, h, mean, rstd, x, residual, *vectors, rows, columns, eps, centred, DTYPES[x.dtype])
    return y, h, mean, rstd


def _forward_fake(x: Any, residual: Any, weight: Any, bias: Any, eps: float, centred: bool) -> Four:
    rows = x.numel() // x.shape[-1]
    mean = x.new_empty(rows, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    h = x.new_empty(0) if residual is None else x.new_empty(x.shape)
    return x.new_empty(x.shape), h, mean, torch.empty_like(mean)


def _backward(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    h: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    centred: bool,
) -> Three:
    """Gradients of input, weight and bias; see ``pipert_norm_backward`` in ``csrc/kernels.h``.

    The bias's is in the dtype of the statistics, for a bias may have another one than the weight.
    """
    rows, columns = rows_of(h, "norm")
    library = library_that_sums(columns, dy, h)
    if library is None:
        return reference.norm_backward(dy, dh, h, weight, mean, rstd, centred)
    dy, h, dh = dy.contiguous(), h.contiguous(), None if dh is None else dh.contiguous()
    dx = torch.empty_like(h)
    count = parts(h, rows)
    sums = h.new_empty(2, columns, dtype=torch.float32)
    workspace = h.new_empty(count, 2, columns, dtype=torch.float32)
    arguments = (dy, dh, h, floats(weight), mean, rstd, rows, columns, centred, DTYPES[h.dtype])
    library.run("norm_backward", dx, sums, workspace, count, *arguments)
    return dx, sums[0].to(weight.dtype, copy=True), sums[1].clone()


def _backward_fake(dy: Any, dh: Any, h: Any, weight: Any, mean: Any, rstd: Any, centred: bool) -> Three:
    return h.new_empty(h.shape), weight.new_empty(weight.shape), torch.empty_like(weight, dtype=mean.dtype)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, residual, weight, bias, _, ctx.centred = inputs
    _, h, mean, rstd = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(x if residual is None else h, weight, mean, rstd)
    ctx.has_residual, ctx.bias_dtype = residual is not None, None if bias is None else bias.dtype


def _gradients(ctx: Any, dy: Any, dh: Any, *_: Any) -> tuple[Any, ...]:
    h, weight, mean, rstd = ctx.saved_tensors
    if not ctx.has_residual:
        dh = None
    if dy is None:
        return dh, dh, None, None, None, None
    dx, dweight, dbias = backward_op(dy, dh, h, weight, mean, rstd, ctx.centred)
    dresidual = dx if ctx.has_residual else None
    return dx, dresidual, dweight, None if ctx.bias_dtype is None else dbias.to(ctx.bias_dtype), None, None


backward_op = define(
    "norm_backward(Tensor dy, Tensor? dh, Tensor h, Tensor weight, Tensor mean, Tensor rstd, bool centred) "
    "-> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    once_only,
)
forward_op = define(
    "norm_forward(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps, bool centred) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    _gradients,
    _save,
)
