"""Optimizers and what they need."""

from __future__ import annotations

from pipert.optim.groups import decay_groups
from pipert.optim.learning_rate import LearningRate
from pipert.optim.loss_scale import Decision, LossScale, LossScaler
from pipert.optim.precision import Precision

__all__ = ["Decision", "LearningRate", "LossScale", "LossScaler", "Precision", "decay_groups"]
