"""What a user may say about a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import nn

from pipert.engine.loss import CountFunction, LossFunction
from pipert.engine.programs import ScheduleSource
from pipert.engine.stage import Recompute
from pipert.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Settings:
    """The arguments of `pipert.Pipeline`; see there.

    Raises:
        ConfigError: an argument cannot be used.
    """

    loss_fn: LossFunction
    schedule: ScheduleSource
    microbatches: int
    chunks: int
    cuts: Sequence[Any] | None
    example: object
    recompute: Recompute
    count_fn: CountFunction | None
    seed: int
    dynamic: bool
    device: torch.device | None
    dtype: torch.dtype | None

    def __post_init__(self) -> None:
        for name in ("microbatches", "chunks"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} = {value!r} must be an integer >= 1")
        if self.recompute not in get_args(Recompute):
            choices = ", ".join(map(repr, get_args(Recompute)))
            raise ConfigError(f"recompute = {self.recompute!r} is none of {choices}")
        if not callable(self.loss_fn):
            raise ConfigError(
                f"loss_fn = {self.loss_fn!r:.80} is not callable; pass a function (output, target) -> loss"
            )
        if isinstance(self.loss_fn, nn.Module) and any(p.requires_grad for p in self.loss_fn.parameters()):
            raise ConfigError(
                f"loss_fn {type(self.loss_fn).__name__} has trainable parameters, which no stage would own; put "
                "them into the model's last block"
            )

    def facts(self) -> dict[str, object]:
        """What must be equal on every rank, by the argument's name."""
        return {
            "microbatches": self.microbatches,
            "chunks": self.chunks,
            "recompute": self.recompute,
            "seed": self.seed,
            "dynamic": self.dynamic,
            "cuts": None if self.cuts is None else repr(list(self.cuts)),
            "dtype": str(self.dtype),
        }
