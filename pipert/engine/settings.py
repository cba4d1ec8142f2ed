"""What a user may say about a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import nn

from pipert.engine.auto import AutoOptions
from pipert.engine.loss import Averaging, CountFunction, LossFunction
from pipert.engine.programs import Offload, ScheduleSource
from pipert.engine.recompute import RecomputeSetting
from pipert.errors import ConfigError
from pipert.optim.loss_scale import LossScale
from pipert.optim.precision import Precision

#: Where embedding and head live: in the first and the last stage, or spread over all ranks by rows.
VocabularyPlace = Literal["ends", "spread"]


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
    recompute: RecomputeSetting
    count_fn: CountFunction | None
    seed: int
    dynamic: bool
    device: torch.device | None
    dtype: torch.dtype | None
    precision: Precision | None = None
    loss_scale: LossScale | None = None
    auto: AutoOptions | None = None
    offload: Offload = None
    vocabulary: VocabularyPlace = "ends"

    def __post_init__(self) -> None:
        for name in ("microbatches", "chunks"):
            check_positive(name, getattr(self, name))
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed = {self.seed!r} must be an integer")
        if self.auto is not None and self.schedule != "auto":
            raise ConfigError(f'auto = … goes with schedule = "auto", not {self.schedule!r:.60}; leave one of them out')
        if self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            raise ConfigError(f"dtype = {self.dtype!r} is no torch.dtype; use torch.float32, torch.bfloat16, ...")
        if self.loss_scale is not None and not isinstance(self.loss_scale, LossScale):
            raise ConfigError(f"loss_scale = {self.loss_scale!r:.60} is no LossScale; pass LossScale(initial=…)")
        if self.count_fn is not None and not callable(self.count_fn):
            raise ConfigError(f"count_fn = {self.count_fn!r:.80} is not callable; pass a function of the targets")
        if self.vocabulary not in get_args(VocabularyPlace):
            choices = ", ".join(map(repr, get_args(VocabularyPlace)))
            raise ConfigError(f"vocabulary = {self.vocabulary!r} is none of {choices}")
        if not callable(self.loss_fn):
            raise ConfigError(
                f"loss_fn = {self.loss_fn!r:.80} is not callable; pass a function (output, target) -> loss"
            )
        if isinstance(self.loss_fn, nn.Module) and any(p.requires_grad for p in self.loss_fn.parameters()):
            raise ConfigError(
                f"loss_fn {type(self.loss_fn).__name__} has trainable parameters, which no stage would own; put "
                "them into the model's last block"
            )

        if self.count_fn is None and _is_torch_loss(self.loss_fn) and Averaging.of(self.loss_fn).reduction == "sum":
            raise ConfigError(
                'loss_fn has reduction = "sum", but micro-batches are weighed by what they count, which is right for a '
                'mean only; use reduction="mean", or pass count_fn if sums are to be averaged'
            )

    def facts(self) -> dict[str, object]:
        """What must be equal on every rank, by the argument's name."""
        return {
            "microbatches": self.microbatches,
            "chunks": self.chunks,
            "recompute": str(self.recompute),
            "offload": str(self.offload),
            "seed": self.seed,
            "dynamic": self.dynamic,
            "cuts": None if self.cuts is None else repr(list(self.cuts)),
            "dtype": str(self.dtype),
            "vocabulary": self.vocabulary,
            "precision": str(self.precision),
            "loss_scale": str(self.loss_scale),
            "auto": repr(self.auto),
        }


def check_positive(name: str, value: object) -> None:
    """Refuse what is no number of things.

    Raises:
        ConfigError: it is no integer >= 1.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} = {value!r} must be an integer >= 1")


def usable_device(device: torch.device | str | None) -> torch.device | None:
    """The device, where this machine has it.

    Raises:
        ConfigError: it has not, or there is no such thing.
    """
    if device is None:
        return None
    try:
        where = torch.device(device)
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f'device = {str(device)!r} cannot be used here ({reason:.120}); use "cpu", or None') from None
    return where


def _is_torch_loss(loss_fn: object) -> bool:
    function = loss_fn.func if isinstance(loss_fn, partial) else loss_fn
    return isinstance(function, nn.modules.loss._Loss) or getattr(function, "__module__", "") == "torch.nn.functional"
