"""What the operations share: checks before a pointer leaves, and memory for results."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.autograd.graph import increment_version

from pipert.hipkernels.errors import KernelInputError

#: Blocks that own contiguous rows where columns are summed: fixed, so that sums do not depend on the machine.
PARTS = {"cpu": 32, "cuda": 512}


def parts(x: torch.Tensor, rows: int) -> int:
    """How many blocks share ``rows`` rows out when columns are summed."""
    return max(1, min(PARTS.get(x.device.type, 32), rows))


def rows_of(x: torch.Tensor, operation: str) -> tuple[int, int]:
    """Numbers of rows and columns of ``x``, seen as a matrix whose rows are its last dimension.

    Raises:
        KernelInputError: x has no dimension, or rows of no elements, or is not floating point.
    """
    if not x.is_floating_point():
        raise KernelInputError(f"{operation}: the input is {x.dtype}; it must be floating point")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise KernelInputError(f"{operation}: shape {tuple(x.shape)}; the last dimension must not be empty")
    return x.numel() // x.shape[-1], x.shape[-1]


def same_shape(operation: str, x: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Check that tensors are like ``x`` in shape, dtype and device.

    Raises:
        KernelInputError: one is not.
    """
    for name, other in others.items():
        if other is not None and (other.shape, other.dtype, other.device) != (x.shape, x.dtype, x.device):
            raise KernelInputError(
                f"{operation}: {name} is {other.dtype} {tuple(other.shape)} on {other.device}, the input {x.dtype} "
                f"{tuple(x.shape)} on {x.device}; they must be alike, so convert one of them"
            )


def column_vector(operation: str, x: torch.Tensor, **vectors: torch.Tensor | None) -> None:
    """Check that vectors have an element for each column of ``x``, floating point, on its device.

    Raises:
        KernelInputError: one has not.
    """
    for name, vector in vectors.items():
        if vector is None:
            continue
        if vector.shape != x.shape[-1:] or not vector.is_floating_point() or vector.device != x.device:
            raise KernelInputError(
                f"{operation}: {name} is {vector.dtype} {tuple(vector.shape)} on {vector.device}; "
                f"it must be floating point, of shape ({x.shape[-1]},), on {x.device}"
            )


def floats(vector: torch.Tensor | None) -> torch.Tensor | None:
    """The vector as contiguous fp32, which is what kernels read whatever the dtype of the matrix."""
    if vector is None or (vector.dtype is torch.float32 and vector.is_contiguous()):
        return vector
    return vector.detach().to(torch.float32).contiguous()


def result(
    out: torch.Tensor | None, x: torch.Tensor, operation: str, inputs: Iterable[torch.Tensor | None] = ()
) -> torch.Tensor:
    """Memory for a result like ``x``, computed from ``inputs``: ``out`` if given.

    Raises:
        KernelInputError: out is unlike x, not contiguous, wants a gradient, or is laid over a part of an input.
    """
    if out is None:
        return x.new_empty(x.shape)
    same_shape(operation, x, out=out)
    if not out.is_contiguous():
        raise KernelInputError(f"{operation}: out has strides {out.stride()}; it must be contiguous")
    if out.requires_grad and torch.is_grad_enabled():
        raise KernelInputError(f"{operation}: out requires a gradient, which writing into it cannot have")
    apart(operation, out, inputs)
    increment_version(out)  # for autograd, which may have saved what is overwritten
    return out


def apart(operation: str, out: torch.Tensor, inputs: Iterable[torch.Tensor | None]) -> None:
    """Check that writing ``out`` changes no element that is still to be read: it may be an input, not overlap one.

    Raises:
        KernelInputError: it overlaps an input.
    """
    begin, end = _span(out)
    for tensor in inputs:
        if tensor is None or not tensor.is_contiguous():
            continue  # others are copied first
        first, last = _span(tensor)
        same = first == begin and tensor.dtype == out.dtype and tensor.numel() == out.numel()
        if first < end and begin < last and not same and tensor.device == out.device:
            raise KernelInputError(f"{operation}: out shares a part of its memory with an input")


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of a contiguous tensor's first byte and of the one behind its last."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
