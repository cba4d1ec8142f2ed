"""Batches for a replica, from an order of samples that no replica count or batch size changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from pipert.data.order import Order, whole
from pipert.data.tokenizer import Ids
from pipert.errors import DataError


class Samples(Protocol):
    """Anything with numbered samples, such as `TokenWindows`."""

    def __len__(self) -> int: ...

    def batch(self, ids: Sequence[int] | Ids) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of these samples."""
        ...


class Loader:
    """An iterator over this replica's part of each global batch, as (inputs, targets).

    Global batch k is the samples at positions ``[k * global_batch, (k + 1) * global_batch)`` of the `Order`, counted
    from where the loader started. The stream runs on from epoch to epoch, so a batch may hold the end of one and the
    start of the next; only the very last batch of a finite stream may be smaller. Replica r of R gets the r-th of R
    contiguous parts, whose sizes differ by at most one, larger ones first (none when there are fewer samples than
    replicas).

    The position is the number of samples that all replicas together have seen. So a run can stop and go on with
    another number of replicas, global batch or micro-batch, and sees the same samples in the same order.

    Every replica reads only its own part. A rank that needs no data calls `skip` instead of ``next``.

    Args:
        samples: where the samples come from.
        global_batch: samples a batch, over all replicas.
        seed: seed of the order.
        epochs: how often each sample is seen; None: no end.
        replica: this replica, ``0 <= replica < replicas``.
        replicas: number of data-parallel replicas.

    Raises:
        DataError: no samples, or numbers that are no counts.

    Attributes:
        seen: the position: samples seen so far.
        order: the order of the samples.
    """

    def __init__(
        self,
        samples: Samples,
        global_batch: int,
        *,
        seed: int = 0,
        epochs: int | None = None,
        replica: int = 0,
        replicas: int = 1,
    ) -> None:
        whole("global_batch", global_batch, 1)
        whole("replicas", replicas, 1)
        if not 0 <= replica < replicas:
            raise DataError(f"replica {replica} of {replicas}; replicas are numbered from 0")
        self.samples = samples
        self.global_batch = global_batch
        self.order = Order(len(samples), seed, epochs)
        self.replica = replica
        self.replicas = replicas
        self.seen = 0

    @property
    def epoch(self) -> int:
        """The epoch in which the next sample is."""
        return self.seen // self.order.samples

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        ids = self.upcoming()
        if not len(ids):
            raise StopIteration
        mine = self.samples.batch(np.array_split(ids, self.replicas)[self.replica])
        self.seen += len(ids)
        return mine

    def upcoming(self) -> npt.NDArray[np.int64]:
        """Sample ids of the next global batch, of all replicas; empty at the end."""
        return self.order.ids(self.seen, self.seen + self.global_batch)

    def skip(self, batches: int = 1) -> None:
        """Go on by some batches without reading them.

        Raises:
            DataError: fewer than none.
        """
        whole("batches", batches, 0)
        self.seen += batches * self.global_batch
        if self.order.length is not None:
            self.seen = min(self.seen, self.order.length)

    def state_dict(self) -> dict[str, int]:
        """The position, and what it is a position in."""
        return {"seen": self.seen, "samples": self.order.samples, "seed": self.order.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a position.

        Raises:
            DataError: it is no position, or one in another order: other samples or another seed.
        """
        absent = [name for name in ("seen", "samples", "seed") if name not in state]
        if absent:
            raise DataError(f"a position without {', '.join(absent)}; give back what state_dict returned")
        whole("the position's seen", state["seen"], 0)
        for name, here in (("samples", self.order.samples), ("seed", self.order.seed)):
            if state[name] != here:
                raise DataError(
                    f"the position was saved with {name} {state[name]}, and here it is {here}; the order would be "
                    "another one, so resume with the same data, sequence length and seed"
                )
        self.seen = state["seen"]
