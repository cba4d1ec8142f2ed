"""Rotary positions."""

from __future__ import annotations

from typing import Any

import torch

from pipert.hipkernels.errors import KernelInputError
from pipert.hipkernels.ops.operator import define
from pipert.hipkernels.ops.tensors import floats, rows_of
from pipert.hipkernels.reference import rotary as reference
from pipert.hipkernels.runtime import DTYPES, Address, library_for


def rotary(
    x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, *, inverse: bool = False, dim: int = -2
) -> torch.Tensor:
    """Turn the pairs ``(x[i], x[half + i])`` of each position by its angles (Su et al. 2021).

    Args:
        x: two to four dimensions, the last one the head width; fp32, bf16 or fp16 (fp64 by the torch reference). Any
            strides, so a view of packed queries, keys and values is read where it lies.
        cosines: of the angles, shape (positions, half) with ``2 * half`` at most the width, any floating-point dtype;
            elements of x beyond ``2 * half`` are copied.
        sines: likewise. Neither table has a gradient.
        inverse: turn back.
        dim: the dimension of the positions.

    Returns:
        like x, in its dtype and, where x is dense, with its strides.

    Raises:
        KernelInputError: the tables do not fit x.
    """
    rows_of(x, "rotary")
    if not 2 <= x.dim() <= 4 or not -x.dim() <= dim < x.dim() or dim % x.dim() == x.dim() - 1:
        raise KernelInputError(f"rotary: shape {tuple(x.shape)}, positions in dimension {dim}; see its documentation")
    positions = x.shape[dim]
    half = cosines.shape[-1] if cosines.dim() == 2 else 0
    for name, table in (("cosines", cosines), ("sines", sines)):
        if table.shape != (positions, half) or not 0 < 2 * half <= x.shape[-1] or table.device != x.device:
            raise KernelInputError(
                f"rotary: {name} have shape {tuple(table.shape)} on {table.device}; x of shape {tuple(x.shape)} on "
                f"{x.device} needs ({positions}, half) with 1 <= half <= {x.shape[-1] // 2}"
            )
    return rotary_op(x, cosines, sines, inverse, dim % x.dim())  # type: ignore[no-any-return]


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x) if x.stride(-1) == 1 else x.new_empty(x.shape)


def _rotary(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, inverse: bool, dim: int) -> torch.Tensor:
    y = _like(x)
    library = library_for(x)
    if library is None:
        return y.copy_(reference.rotary(x, cosines, sines, inverse, dim))
    x = x if x.stride(-1) == 1 else x.contiguous()
    missing = 4 - x.dim()
    sizes = (1,) * missing + x.shape[:-1]
    strides = [(0,) * missing + t.stride()[:-1] for t in (x, y)]
    steps = [1 if axis == dim + missing else 0 for axis in range(3)]
    tables = floats(cosines), floats(sines)
    numbers = (*sizes, *strides[0], *strides[1], *steps, cosines.shape[1], x.shape[-1])
    library.run("rotary", Address(y), Address(x), *tables, *numbers, inverse, DTYPES[x.dtype], work=x.numel())
    return y


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    _, cosines, sines, ctx.inverse, ctx.dim = inputs
    ctx.save_for_backward(cosines, sines)


def _gradients(ctx: Any, dy: Any) -> tuple[Any, ...]:
    return rotary_op(dy, *ctx.saved_tensors, not ctx.inverse, ctx.dim), None, None, None, None


rotary_op = define(
    "rotary(Tensor x, Tensor cosines, Tensor sines, bool inverse, int dim) -> Tensor",
    _rotary,
    lambda x, *rest: _like(x),
    _gradients,
    _save,
)
