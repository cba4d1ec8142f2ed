"""Which parameters share a flat buffer, how they lie in it, and which part of it each replica keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import torch

#: Bytes of the parameters of a bucket, unless one of them alone has more.
BUCKET_BYTES = 25 * 2**20

_Item = TypeVar("_Item")


def buckets_of(items: Sequence[_Item], nbytes: Callable[[_Item], int]) -> Iterator[list[_Item]]:
    """Items in order, as many together as have `BUCKET_BYTES` at most, and at least one."""
    bucket: list[_Item] = []
    size = 0
    for item in items:
        more = nbytes(item)
        if bucket and size + more > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(item)
        size += more
    if bucket:
        yield bucket


@dataclass(frozen=True)
class Piece:
    """What one shard holds of one parameter; all are numbers of elements.

    Attributes:
        parameter: which of the buffer's parameters.
        start, stop: where in the shard.
        first: where in the parameter.
    """

    parameter: int
    start: int
    stop: int
    first: int


@dataclass(frozen=True)
class Layout:
    """Parameters one behind the other in a buffer of ``parts`` equal shards, the last ones padded with zeros.

    ::

        |--a--|-b-|---------c---------|pad|
        |  shard 0  |  shard 1  |  shard 2  |

    Attributes:
        sizes: elements of each parameter; there may be empty ones.
        parts: replicas that share the buffer.
        index: which shard is this replica's.
    """

    sizes: tuple[int, ...]
    parts: int = 1
    index: int = 0

    @property
    def shard(self) -> int:
        """Elements of a shard."""
        return -(-sum(self.sizes) // self.parts)

    @property
    def padded(self) -> int:
        """Elements of the buffer."""
        return self.shard * self.parts

    @property
    def own(self) -> slice:
        """This replica's part of the buffer."""
        return slice(self.index * self.shard, (self.index + 1) * self.shard)

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each parameter begins in the buffer."""
        return tuple(accumulate(self.sizes, initial=0))[:-1]

    def pieces(self) -> tuple[Piece, ...]:
        """What this replica's shard holds, in order; parameters without an element in it are left out."""
        own, found = self.own, []
        for number, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            low, high = max(start, own.start), min(start + size, own.stop)
            if low < high:
                found.append(Piece(number, low - own.start, high - own.start, low - start))
        return tuple(found)

    def views(self, flat: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
        """The parameters in a buffer, in their shapes."""
        return [
            flat[start : start + size].view(shape)
            for start, size, shape in zip(self.starts, self.sizes, shapes, strict=True)
        ]
