"""Optimizers and what they need."""

from __future__ import annotations

from pipert.optim.groups import decay_groups
from pipert.optim.learning_rate import LearningRate

__all__ = ["LearningRate", "decay_groups"]
