"""What a step gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class StepResult:
    """The result of a step; the same on every rank, but for ``outputs``.

    Attributes:
        loss: mean loss over everything that the whole batch counts, over micro-batches and replicas; 0.0 if nothing is.
        tokens: what the whole batch counts.
        samples: samples of the whole batch.
        microbatches: micro-batches of the whole batch, over all replicas.
        step: number of the step, from 0; evaluations have that of the step to come.
        outputs: after ``eval_step(…, outputs=True)``, on the ranks that own the last stage: the model's output for each
            micro-batch. None elsewhere.
    """

    loss: float
    tokens: float
    samples: int
    microbatches: int
    step: int
    outputs: tuple[Any, ...] | None = field(default=None, compare=False, repr=False)
