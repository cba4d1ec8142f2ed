"""A tensor's own memory as bytes, and the checks that come before it is handed to a transport."""

from __future__ import annotations

import operator

import torch

from pipert.comm.errors import MessageError


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Show a tensor's memory as one row of bytes, without a copy and outside autograd.

    Args:
        tensor: contiguous, of any dtype, device and shape, also with 0 elements or dimensions.

    Returns:
        A ``uint8`` tensor of shape ``(tensor.numel() * tensor.element_size(),)`` on the same memory.

    Raises:
        MessageError: the tensor's values do not lie in one dense piece of memory.
    """
    check_dense(tensor)
    return tensor.detach().reshape(-1).view(torch.uint8)


def check_dense(tensor: torch.Tensor) -> None:
    """Refuse what is not one dense piece of memory that holds the values as they are.

    Raises:
        MessageError: no tensor, or a sparse, meta, non-contiguous, lazily conjugated or lazily negated one.
    """
    if not isinstance(tensor, torch.Tensor):
        raise MessageError(f"a message must be a torch.Tensor, not {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_meta:
        reason = f"has no dense memory ({tensor.layout}, {tensor.device}); make it a dense tensor"
    elif not tensor.is_contiguous():
        reason = f"is not contiguous (strides {tensor.stride()}); call .contiguous() first"
    elif tensor.is_conj() or tensor.is_neg():
        reason = "is conjugated or negated lazily; call .resolve_conj().resolve_neg() first"
    else:
        return
    raise MessageError(f"the message {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} {reason}")


def check_peer(peer: int, size: int, what: str) -> int:
    """Return the peer as an int.

    Raises:
        MessageError: it is not a rank of a group of ``size``.
    """
    try:
        rank = operator.index(peer)
    except TypeError:
        raise MessageError(f"{what} = {peer!r} is not a rank; use an int") from None
    if not 0 <= rank < size:
        raise MessageError(f"{what} = {rank} is not a rank of this group of {size}; use 0 to {size - 1}")
    return rank


def check_tag(tag: int, bound: int) -> int:
    """Return the tag as an int.

    Raises:
        MessageError: it does not lie in ``0 <= tag < bound``.
    """
    try:
        value = operator.index(tag)
    except TypeError:
        raise MessageError(f"tag = {tag!r} is not a number; use an int") from None
    if not 0 <= value < bound:
        raise MessageError(f"tag = {value} is out of bounds; this transport takes 0 <= tag < {bound}")
    return value


def check_parts(whole: torch.Tensor, part: torch.Tensor, size: int, what: str) -> None:
    """Check that ``whole`` holds ``size`` parts like ``part``.

    Raises:
        MessageError: element counts or dtypes do not fit.
    """
    if whole.dtype != part.dtype:
        raise MessageError(f"{what}: the dtypes {whole.dtype} and {part.dtype} differ; use one")
    if whole.numel() != size * part.numel():
        raise MessageError(
            f"{what}: {whole.numel()} elements are not {size} ranks x {part.numel()}; "
            f"the larger tensor must have {size * part.numel()}"
        )
