"""Reductions with one order and one rounding, the same bits on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipert.comm.errors import MessageError


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a dtype is summed in: fp32 for floats narrower than that, else itself."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def check_reduction(dtype: torch.dtype, op: str) -> None:
    """Refuse reductions that have no meaning.

    Raises:
        MessageError: an unknown op, a sum of bools or a maximum of complex numbers.
    """
    if op not in ("sum", "max"):
        raise MessageError(f"op = {op!r} is not a reduction; use 'sum' or 'max'")
    if op == "sum" and dtype == torch.bool:
        raise MessageError("a sum of bools has no meaning; use op='max' for 'any', or convert to torch.int64")
    if op == "max" and dtype.is_complex:
        raise MessageError("complex numbers have no maximum; reduce torch.view_as_real(tensor)")


def reduce_in_order(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Reduce tensors of one shape and dtype in the order given, in the accumulation dtype, rounded once.

    Returns:
        A new tensor of the parts' shape and dtype. NaNs propagate, in a maximum too.
    """
    total = parts[0].detach().to(accumulation_dtype(parts[0].dtype), copy=True)
    for part in parts[1:]:
        if op == "sum":
            total += part.detach()
        else:
            torch.maximum(total, part.detach().to(total.dtype), out=total)
    return total.to(parts[0].dtype)
