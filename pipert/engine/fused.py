"""A product added to a sum: in one pass over the sum where this machine's library gives the same bits that way.

A weight's gradient is a product of two matrices that is added to what earlier micro-batches left. Computed apart, it is
written, read again and added, which takes a tenth to a sixth longer in a small model. BLAS can add while it
multiplies, and does the same roundings if it completes an entry before adding it, as long as the inner dimension fits
into one of its blocks. No library promises that, so it is tried: once for every shape, with random numbers, of which
thousands would have to agree by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

#: Entries of a sum: with fewer an agreement says little, and with more a trial takes much memory.
_FEWEST, _MOST = 4096, 2**25
#: Bytes: code for vectors may depend on where memory begins within this much.
_VECTOR = 64


class _Layout(NamedTuple):
    """How a matrix lies in memory; ``start`` counts from the last multiple of `_VECTOR` bytes."""

    shape: Sequence[int]
    stride: Sequence[int]
    start: int

    @classmethod
    def of(cls, matrix: torch.Tensor) -> _Layout:
        return cls(matrix.shape, matrix.stride(), matrix.data_ptr() % _VECTOR)


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """``total += left @ right``, with the bits of a product that is rounded, then added.

    Args:
        total: a matrix, changed in place.
        left: a matrix of as many rows.
        right: a matrix of as many columns.
    """
    if _may_be_tried(total, left, right) and _alike(
        _Layout.of(total), _Layout.of(left), _Layout.of(right), total.dtype, torch.get_num_threads(), _precision()
    ):
        total.addmm_(left, right)
    else:
        total.add_(left.mm(right))


def _may_be_tried(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> bool:
    return (
        total.device.type == left.device.type == "cpu"
        and total.dtype is left.dtype is right.dtype
        and type(total) is torch.Tensor
        and _FEWEST <= total.numel() <= _MOST
        and total.is_contiguous()
        and all(matrix.is_contiguous() or matrix.t().is_contiguous() for matrix in (left, right))
    )


def _precision() -> str:
    """What may change which code multiplies float32."""
    return torch.get_float32_matmul_precision()


@lru_cache(maxsize=4096)
def _alike(total: _Layout, left: _Layout, right: _Layout, dtype: torch.dtype, threads: int, precision: str) -> bool:
    """Whether both ways give the same bits for matrices that lie in memory like these."""
    generator = torch.Generator().manual_seed(0)
    sums, a, b = (_random(layout, dtype, generator) for layout in (total, left, right))
    apart = sums + a.mm(b)
    return torch.equal(apart, sums.addmm_(a, b))


def _random(layout: _Layout, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random numbers in a memory layout."""
    extent = 1 + sum((size - 1) * step for size, step in zip(layout.shape, layout.stride, strict=True))
    memory = torch.empty(extent + 2 * _VECTOR // dtype.itemsize, dtype=dtype)
    offset = (layout.start - memory.data_ptr()) % _VECTOR // dtype.itemsize
    matrix = memory.as_strided(tuple(layout.shape), tuple(layout.stride), offset)
    return matrix.normal_(generator=generator)
