"""Bytes that training keeps on one rank: counted, and by the formula of ZeRO."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from pipert.optim.precision import Precision


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        parameters: weights that the model computes with, between steps.
        gradients: gradients that are there when the backwards are over.
        moments: what the optimizer keeps for each weight, such as running means.
        masters: weights in higher precision, where the model has rounded copies.
        rollback: copies with which an early step can be undone; only until `step` is over.
        gathered: at ZeRO stage 3: weights that are whole at once during a step, at most.
    """

    parameters: int
    gradients: int
    moments: int
    masters: int
    rollback: int = 0
    gathered: int = 0

    @property
    def total(self) -> int:
        """What is there all the time: parameters, gradients, moments and masters."""
        return self.parameters + self.gradients + self.moments + self.masters


def zero_memory(
    parameters: int,
    *,
    zero: int = 0,
    replicas: int = 1,
    precision: Precision | None = None,
    frozen: int = 0,
    moments: int = 2,
    early: bool = False,
) -> Memory:
    """The formula of ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054), for one rank.

    With Ψ trained and Φ frozen parameters on N replicas, and bytes p, g, m for a parameter, gradient and master:

    ========  ==============  ===========  ==================
    stage     parameters      gradients    moments, masters
    ========  ==============  ===========  ==================
    0         p (Ψ + Φ)       g Ψ          m Ψ each
    1         p (Ψ + Φ)       g Ψ          m Ψ / N each
    2         p (Ψ + Φ)       g Ψ / N      m Ψ / N each
    3         p (Ψ + Φ) / N   g Ψ / N      m Ψ / N each
    ========  ==============  ===========  ==================

    Not counted: padding (less than N elements a bucket), and the gradients of the micro-batch at work.

    Args:
        parameters: Ψ, of this rank's stages.
        zero: the ZeRO stage.
        replicas: N.
        precision: the dtypes; default fp32.
        frozen: Φ.
        moments: how many numbers the optimizer keeps for each weight: 2 for AdamW, 1 for SGD with momentum.
        early: steps are early.
    """
    kinds = precision or Precision()
    assert kinds.gradients is not None
    assert kinds.master is not None
    shared = [replicas if zero >= stage else 1 for stage in (3, 2, 1)]
    state = kinds.master.itemsize * parameters // shared[2]
    return Memory(
        parameters=kinds.parameters.itemsize * (parameters + frozen) // shared[0],
        gradients=kinds.gradients.itemsize * parameters // shared[1],
        moments=moments * state,
        masters=state if kinds.has_master else 0,
        rollback=(1 + moments) * state if early else 0,
        gathered=kinds.parameters.itemsize * (parameters + frozen) if zero == 3 else 0,
    )


def nbytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of memory of some tensors; memory that several share counts once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())
