"""Random numbers that depend on what they are for, never on who draws them or when.

Every use has its own stream, named by a key: a parameter's name, or a dropout layer with a step and a sample. A stream
has no past, so it can be drawn on any rank, in any order, and again (recompute), and the numbers are the same.

    stream(seed, "blocks.3.mlp.up.weight")          the initial values of one parameter
    digest(seed, "dropout", "blocks.3.mlp_dropout", 17, 5)     the key of one mask: step 17, sample 5 of the batch

A mask goes by counter: each element has its own number, so a rank with a part of a sample has that part of the mask,
and every kind of device draws the same.

A `Draw` says which step and samples a forward pass computes. It is set around the pass with `drawing` and read by
layers with `current_draw`; it lives in a `contextvars.ContextVar`, so ranks that are threads do not see each other's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import torch

_SKIP_BITS = 12


@dataclass(frozen=True, slots=True)
class Draw:
    """What a forward pass computes, as far as random numbers are concerned.

    Attributes:
        seed: the run's seed.
        step: number of the optimizer step.
        samples: for each row of the micro-batch (dimension 0) its index in the global batch.
    """

    seed: int
    step: int
    samples: tuple[int, ...]


_current: ContextVar[Draw | None] = ContextVar("pipert_draw", default=None)


def current_draw() -> Draw | None:
    """The `Draw` of the innermost `drawing` around the caller in this thread; None outside of any."""
    return _current.get()


class drawing:
    """Make ``draw`` the current one inside the ``with`` block (None: as if outside of any).

    New threads start outside of any. A function that autograd may call later from one of its device threads
    (recompute on a GPU) must therefore remember the draw and enter it again.
    """

    __slots__ = ("_draw", "_token")  # entered for every block of every micro-batch: a class costs half a generator's

    def __init__(self, draw: Draw | None) -> None:
        self._draw = draw

    def __enter__(self) -> None:
        self._token = _current.set(self._draw)

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


class Holder(Protocol):
    """Who has something that ranks which are threads of one process use in turn, such as torch's global generator."""

    def let_go(self) -> None:
        """Let others have it."""
        ...

    def take_back(self) -> None:
        """Wait for it, and have it as it was."""
        ...


_holder: ContextVar[Holder | None] = ContextVar("pipert_holder", default=None)


@contextmanager
def holding(holder: Holder) -> Iterator[None]:
    """Inside the ``with`` block `letting_go` asks this holder."""
    token = _holder.set(holder)
    try:
        yield
    finally:
        _holder.reset(token)


@contextmanager
def letting_go() -> Iterator[None]:
    """Around whatever waits for other ranks inside a block: let go of what they may need before they can come."""
    holder = _holder.get()
    if holder is None:
        yield
        return
    holder.let_go()
    try:
        yield
    finally:
        holder.take_back()


def digest(seed: int, *key: str | int) -> int:
    """64 bits that name a stream: blake2b of the seed and key, in an encoding in which no two keys look alike."""
    parts = ((f"s{len(part)}:" if isinstance(part, str) else "i") + str(part) for part in (seed, *key))
    return int.from_bytes(blake2b(" ".join(parts).encode(), digest_size=8).digest(), "little")


def stream(seed: int, *key: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator, at the start of the stream with this name.

    The `digest` of the name seeds it. torch's CPU generator (mt19937) keeps only the low 32 bits of a seed, so two of
    a large model's parameters could get equal values (128 layers: once in 3,000 runs); 12 more bits of the digest say
    how far into the sequence the stream starts (2 us on average).

    Args:
        seed: the run's seed.
        key: what the numbers are for, such as ``("blocks.0.mlp.up.weight",)``. ``1`` and ``"1"`` differ.
        device: where the numbers will be drawn. The numbers are the same on all devices of one type, but CPU and GPU
            generators differ: draw on the CPU what must be equal everywhere.
    """
    bits = digest(seed, *key)
    generator = torch.Generator(device=device)
    generator.manual_seed(bits)
    if generator.device.type == "cpu":
        torch.empty(bits >> (64 - _SKIP_BITS), dtype=torch.int32).random_(generator=generator)
    return generator
