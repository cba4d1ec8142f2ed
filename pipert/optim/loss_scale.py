"""Dynamic loss scaling (Micikevicius et al. 2018, arXiv 1710.03740), and the one decision about every update."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pipert.errors import ConfigError


@dataclass(frozen=True)
class LossScale:
    """How the factor moves by which the loss is multiplied before a backward in fp16.

    After an overflow it falls by ``factor`` at once; after ``interval`` updates in a row without one it rises by it.

        65536 |--.        .-----
              |  `--------'          an overflow, then ``interval`` good updates
              +------------------> updates and skipped updates

    Attributes:
        initial: where it starts.
        interval: good updates until it rises.
        factor: by which it falls and rises; 1: it stays.
        least: where it stops falling.
        most: where it stops rising.

    Raises:
        ConfigError: a number is out of range, or no power of 2 (others would round every gradient).
    """

    initial: float = 2.0**16
    interval: int = 2000
    factor: float = 2.0
    least: float = 1.0
    most: float = 2.0**24

    def __post_init__(self) -> None:
        if isinstance(self.interval, bool) or not isinstance(self.interval, int) or self.interval < 1:
            raise ConfigError(f"interval = {self.interval!r} of a loss scale must be an integer >= 1")
        for name in ("initial", "factor", "least", "most"):
            value = getattr(self, name)
            if not _is_power_of_2(value):
                raise ConfigError(f"{name} = {value!r} of a loss scale must be a power of 2")
        if self.factor < 1 or not self.least <= self.initial <= self.most:
            raise ConfigError(f"{self}: use factor >= 1 and least <= initial <= most")


def _is_power_of_2(value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return number and value > 0 and math.frexp(value)[0] == 0.5  # type: ignore[operator, arg-type]


@dataclass(frozen=True)
class Decision:
    """What happens to one update: the same on every rank, because it follows from the norm of all gradients.

    Attributes:
        norm: of all gradients of the model, before clipping.
        apply: whether there is an update; not if some gradient is inf or NaN.
        factor: by which gradients are multiplied first (clipping).
        scale: the loss scale of these gradients; they have been divided by it already.
    """

    norm: float
    apply: bool
    factor: float
    scale: float


class LossScaler:
    """The loss scale now, and how many good updates it has seen. Every rank holds one; all make the same moves.

    Args:
        config: how it moves; None: it is 1 and stays.

    Attributes:
        scale: by which the loss of the next step is multiplied.
        good: updates since it moved last.
        skipped: updates that were skipped so far.
    """

    def __init__(self, config: LossScale | None = None) -> None:
        self.config = config or LossScale(initial=1.0, factor=1.0)
        self.scale = float(self.config.initial)
        self.good = 0
        self.skipped = 0

    def decide(self, norm: float, max_norm: float | None = None) -> Decision:
        """Decide about one update, and move the scale. Call it once an update, with the same norm on every rank.

        Args:
            norm: of all gradients of the model; inf or NaN if one of them is.
            max_norm: the norm they may have; None: any.

        Raises:
            ConfigError: ``max_norm`` is not positive.
        """
        decision = Decision(norm, math.isfinite(norm), clip_factor(norm, max_norm), self.scale)
        self._move(decision.apply)
        return decision

    def _move(self, good: bool) -> None:
        config = self.config
        if not good:
            self.skipped += 1
            self.scale, self.good = max(self.scale / config.factor, config.least), 0
            return
        self.good += 1
        if self.good >= config.interval:
            self.scale, self.good = min(self.scale * config.factor, config.most), 0

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps: plain numbers."""
        return {"scale": self.scale, "good": self.good, "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from a `state_dict`; how the scale moves stays as configured here.

        Raises:
            ConfigError: a number is missing or impossible.
        """
        try:
            scale, good, skipped = float(state["scale"]), int(state["good"]), int(state["skipped"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"no state of a loss scale: {dict(state)!r:.80} ({error!r})") from error
        if not _is_power_of_2(scale) or good < 0 or skipped < 0:
            raise ConfigError(f"no state of a loss scale: scale {scale}, {good} good, {skipped} skipped updates")
        self.scale, self.good, self.skipped = scale, good, skipped


def clip_factor(norm: float, max_norm: float | None) -> float:
    """By what gradients of this norm are multiplied; `torch.nn.utils.clip_grad_norm_`'s rule.

    Raises:
        ConfigError: ``max_norm`` is not positive.
    """
    if max_norm is None:
        return 1.0
    check_max_norm(max_norm)
    factor = max_norm / (norm + 1e-6)
    return factor if factor < 1.0 or math.isnan(factor) else 1.0


def check_max_norm(max_norm: object) -> None:
    """Refuse what no norm can be compared with.

    Raises:
        ConfigError: it is no positive number.
    """
    if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)) or not max_norm > 0:
        raise ConfigError(f"max_norm = {max_norm!r} must be a positive number")
