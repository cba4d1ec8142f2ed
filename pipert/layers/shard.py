"""Which part of a whole parameter a tensor-parallel rank holds: a value, and the maps between whole and parts.

    Shard(whole=(192, 64), dim=0, parts=2, index=1, pieces=((128, 8), (32, 2), (32, 2)))   8 query, 2 key, 2 value heads

                whole        rank 0      rank 1
      queries   0 .. 127     0 .. 63     64 .. 127
      keys      128 .. 159   128 .. 143  144 .. 159
      values    160 .. 191   160 .. 175  176 .. 191

A parameter carries its `Shard`, so that initial values, norms and checkpoints know what it is a part of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn

from pipert.comm.transport import Transport
from pipert.errors import ConfigError
from pipert.graph.spare import KEPT

_SHARD = f"{KEPT}shard"
_PARTIAL = f"{KEPT}partial"


class Span(NamedTuple):
    """Consecutive rows of a whole parameter that a shard holds.

    Attributes:
        start, stop: rows of the whole, ``start <= row < stop``.
        copies: how many ranks hold these rows.
        copy: which of them this one is; copy 0 counts in totals.
    """

    start: int
    stop: int
    copies: int = 1
    copy: int = 0


@dataclass(frozen=True)
class Shard:
    """A rank's part of a parameter that is split along one dimension. Its rows are the `spans`, then zeros.

    Attributes:
        whole: shape of the whole parameter.
        dim: the dimension that is split.
        parts: how many ranks share it.
        index: which of them.
        pieces: (rows, units) of each piece of the whole along ``dim``. Every piece is split into equal parts by itself,
            between units: the heads of a projection, or the rows. A piece of fewer units than parts has each of them
            on ``parts / units`` ranks. Empty: one piece of all rows.
        padded: whether rows that the whole has not, zeros at its end, make it divisible.

    Raises:
        ConfigError: a piece cannot be split so.
    """

    whole: tuple[int, ...]
    dim: int
    parts: int
    index: int
    pieces: tuple[tuple[int, int], ...] = ()
    padded: bool = False

    def __post_init__(self) -> None:
        rows = self.whole[self.dim]
        if not self.pieces:
            object.__setattr__(self, "pieces", ((rows, rows),))
        if sum(size for size, _ in self.pieces) != rows:
            sizes = " + ".join(str(size) for size, _ in self.pieces)
            raise ConfigError(f"pieces of {sizes} rows are not the {rows} rows of dimension {self.dim} of {self.whole}")
        for size, units in () if self.padded else self.pieces:
            if size % units or (units % self.parts and self.parts % units):
                raise ConfigError(
                    f"{size} rows of {units} units (dimension {self.dim} of {self.whole}) cannot be split among tp = "
                    f"{self.parts} ranks: {units} / {self.parts} leaves {units % self.parts} over; use a tp that "
                    f"divides {units}"
                )

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The rows of the whole that lie here, in the order in which they do."""
        if self.padded:
            rows, size = self.whole[self.dim], self.size
            return (Span(min(self.index * size, rows), min((self.index + 1) * size, rows)),)
        spans, first = [], 0
        for size, units in self.pieces:
            copies = max(1, self.parts // units)
            part = size * copies // self.parts
            start = first + self.index // copies * part
            spans.append(Span(start, start + part, copies, self.index % copies))
            first += size
        return tuple(spans)

    @cached_property
    def size(self) -> int:
        """Rows here, with the padding."""
        if self.padded:
            return -(-self.whole[self.dim] // self.parts)
        return sum(span.stop - span.start for span in self.spans)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return (*self.whole[: self.dim], self.size, *self.whole[self.dim + 1 :])

    @property
    def filled(self) -> int:
        """Rows here that are no padding."""
        return sum(span.stop - span.start for span in self.spans)

    @property
    def shared(self) -> bool:
        """Whether other ranks hold some of these rows, too."""
        return any(span.copies > 1 for span in self.spans)

    @property
    def counted(self) -> tuple[tuple[int, int], ...]:
        """Rows here (start, stop) that totals count here; the others are counted by another rank."""
        return tuple((start, stop) for start, stop, span in self.places() if span.copy == 0)

    def places(self) -> Iterator[tuple[int, int, Span]]:
        """Each span, and where it lies here (start, stop)."""
        start = 0
        for span in self.spans:
            stop = start + span.stop - span.start
            yield start, stop, span
            start = stop

    def at(self, index: int, parts: int | None = None) -> Shard:
        """Another rank's part of the same parameter, also in another number of parts."""
        return replace(self, index=index, parts=self.parts if parts is None else parts)

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """This part of a whole tensor, in memory of its own."""
        part = whole.new_zeros(self.shape)
        for start, stop, span in self.places():
            source = whole.narrow(self.dim, span.start, span.stop - span.start)
            part.narrow(self.dim, start, stop - start).copy_(source)
        return part

    def shared_places(self) -> Iterator[tuple[int, int, int, int]]:
        """Rows here that others hold, too: (start, stop), the first one's number in its piece, the piece's rows."""
        first = 0
        for (start, stop, span), (size, _) in zip(self.places(), self.pieces, strict=True):
            if span.copies > 1:
                yield start, stop, span.start - first, size
            first += size

    def put(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Write this part into a whole tensor."""
        for start, stop, span in self.places():
            target = whole.narrow(self.dim, span.start, span.stop - span.start)
            target.copy_(part.narrow(self.dim, start, stop - start))


def to_shard(whole: torch.Tensor, shard: Shard) -> torch.Tensor:
    """A rank's part of a whole tensor (a parameter, a gradient, a moment), in memory of its own."""
    return shard.take(whole)


def to_full(parts: Sequence[torch.Tensor], shard: Shard) -> torch.Tensor:
    """The whole tensor from the parts of all ranks, in rank order; ``shard`` is any rank's."""
    whole = parts[0].new_empty(shard.whole)
    for index, part in enumerate(parts):
        shard.at(index).put(part, whole)
    return whole


def gather_full(part: torch.Tensor, shard: Shard, group: Transport) -> torch.Tensor:
    """The whole tensor on every rank of the group: one all-gather of the parts."""
    own = part.detach().contiguous()
    everybody = own.new_empty(shard.parts, *own.shape)
    group.wait(group.iallgather(everybody, own), "gathering a sharded parameter")
    return to_full(list(everybody), shard)


def shard_of(tensor: torch.Tensor) -> Shard | None:
    """What a parameter is a part of; None for one that every tensor-parallel rank has whole."""
    found = getattr(tensor, _SHARD, None)
    assert found is None or isinstance(found, Shard)
    return found


def set_shard(tensor: torch.Tensor, shard: Shard) -> None:
    """Say what a parameter is a part of; the only part is the whole, of which nothing need be said."""
    if shard.parts > 1:
        setattr(tensor, _SHARD, shard)


def mark_partial(parameter: torch.Tensor) -> None:
    """Say that each tensor-parallel rank finds only a part of this whole parameter's gradient: they must be summed."""
    setattr(parameter, _PARTIAL, True)


def is_partial(parameter: torch.Tensor) -> bool:
    """Whether `mark_partial` was said of it."""
    return bool(getattr(parameter, _PARTIAL, False))


def is_summed(parameter: torch.Tensor) -> bool:
    """Whether the parameter's gradient must be summed over the tensor-parallel ranks, once a step."""
    shard = shard_of(parameter)
    return is_partial(parameter) or (shard is not None and shard.shared)


#: The parts that whole parameters have become, so that tied ones stay one object: whole, shard, part.
Tied = dict[int, tuple[nn.Parameter, Shard, nn.Parameter]]


def sharded_parameter(parameter: nn.Parameter, shard: Shard, tied: Tied | None = None) -> nn.Parameter:
    """A rank's part of a whole parameter, as a parameter; on the meta device without values.

    Raises:
        ConfigError: the parameter is tied to one that was split in another way.
    """
    known = None if tied is None else tied.get(id(parameter))
    if known is not None:
        if known[1] != shard:
            raise ConfigError(f"a tied weight of shape {shard.whole} is split in two ways: {known[1]} and {shard}")
        return known[2]
    if parameter.is_meta:
        part = torch.empty(shard.shape, dtype=parameter.dtype, device="meta")
    else:
        part = shard.take(parameter.detach())
    result = nn.Parameter(part, parameter.requires_grad)
    set_shard(result, shard)
    if tied is not None:
        tied[id(parameter)] = parameter, shard, result
    return result
