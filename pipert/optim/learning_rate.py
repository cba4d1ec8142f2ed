"""The learning rate, a function of the number of updates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pipert.errors import ConfigError


@dataclass(frozen=True)
class LearningRate:
    """Warm-up, then a fall.

    It counts the optimizer's updates, not steps tried: a step that was skipped leaves it alone. It holds no state; call
    it with the number of updates done so far.

        rate ^   ______
             |  /      ``--..__
             | /               ``--.._______ final * peak
             +--|---------------------|------> updates
              warmup               length

    Attributes:
        peak: the largest rate.
        shape: how it falls: half a cosine (Loshchilov and Hutter 2017), a line, or not at all.
        warmup: updates in which it rises in equal steps; the first update has ``peak / warmup``.
        length: updates until it has fallen to its end.
        final: its end, as a share of the peak.
    """

    peak: float
    shape: Literal["cosine", "linear", "constant"] = "constant"
    warmup: int = 0
    length: int = 1
    final: float = 0.0

    def __post_init__(self) -> None:
        if self.shape not in ("cosine", "linear", "constant"):
            raise ConfigError(f"no learning-rate shape is called {self.shape!r}; there are cosine, linear and constant")
        if self.warmup < 0 or self.length < self.warmup:
            raise ConfigError(f"warmup {self.warmup} and length {self.length}: use 0 <= warmup <= length")

    def __call__(self, updates: int) -> float:
        """The rate for the next update, after ``updates`` of them."""
        if updates < self.warmup:
            return self.peak * (updates + 1) / self.warmup
        if self.shape == "constant":
            return self.peak
        done = min(1.0, (updates - self.warmup) / max(1, self.length - self.warmup))
        left = 0.5 + 0.5 * math.cos(math.pi * done) if self.shape == "cosine" else 1.0 - done
        return self.peak * (self.final + (1.0 - self.final) * left)
