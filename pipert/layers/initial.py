"""Initial values that depend on (seed, parameter name) only."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Protocol, runtime_checkable

import torch

from pipert.layers.shard import shard_of
from pipert.randomness import stream

#: How many numbers are drawn at once, about: what a rank needs beside its own part.
CHUNK = 1 << 20
#: torch makes normal numbers 16 at a time, from as many uniform ones; so pieces of whole sixteens follow on.
_TOGETHER = 16


@runtime_checkable
class Initialises(Protocol):
    """A module that can fill the parameters and buffers it owns itself, not those of its children."""

    def init_parameters(self, seed: int, prefix: str) -> None:
        """Fill them.

        Args:
            seed: the run's seed.
            prefix: the module's name in the whole model; values come from ``stream(seed, f"{prefix}.weight")``.
        """
        ...


def fill_normal(tensor: torch.Tensor, std: float, seed: int, name: str) -> None:
    """Fill with the normal distribution's stream of this name, mean 0. A shard gets its part of the whole's numbers.

    The numbers are drawn in float32 on the CPU, then copied: the same for every dtype (but for rounding) and device.
    """
    draw_normal(tensor, std, stream(seed, name))


@torch.no_grad()
def draw_normal(tensor: torch.Tensor, std: float, generator: torch.Generator | None = None) -> None:
    """Fill with normal numbers, mean 0, drawn in float32; of a shard's whole parameter at most `CHUNK` at a time.

    Args:
        tensor: what to fill; the padding of a shard becomes 0.
        std: standard deviation.
        generator: where the numbers come from; default torch's global generator.
    """
    if tensor.is_meta:
        return
    shard = shard_of(tensor)
    if shard is None:
        tensor.copy_(torch.empty(tensor.shape, dtype=torch.float32).normal_(0.0, std, generator=generator))
        return
    tensor.zero_()
    for first, rows in _normal_rows(shard.whole, std, generator):
        for start, stop, span in shard.places():
            if shard.dim:
                source = rows.narrow(shard.dim, span.start, span.stop - span.start)
                tensor[first : first + len(rows)].narrow(shard.dim, start, stop - start).copy_(source)
                continue
            low, high = max(first, span.start), min(first + len(rows), span.stop)
            if low < high:
                tensor[start + low - span.start : start + high - span.start].copy_(rows[low - first : high - first])


def _normal_rows(
    shape: tuple[int, ...], std: float, generator: torch.Generator | None
) -> Iterator[tuple[int, torch.Tensor]]:
    """The rows of a tensor drawn in one go, some at a time: the first one's number and the rows."""
    width = max(1, prod(shape[1:]))
    step = max(_TOGETHER, CHUNK // width // _TOGETHER * _TOGETHER)
    starts = list(range(0, max(1, shape[0] - step), step))  # the last piece is not short: its numbers are drawn apart
    for start, stop in zip(starts, [*starts[1:], shape[0]], strict=True):
        yield start, torch.empty(stop - start, *shape[1:]).normal_(0.0, std, generator=generator)
