"""Costs: how long each action takes, as a value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pipert.scheduler.action import COUNTERPART, Kind
from pipert.scheduler.dependencies import TELLS
from pipert.scheduler.errors import CostError

#: The cost of each action of a spread vocabulary.
_VOCABULARY = {
    Kind.S: "logits",
    Kind.T: "head_gradient",
    Kind.G: "embedding_gradient",
    Kind.CAST_H: "broadcast",
    Kind.CAST_E: "broadcast",
    Kind.STATS: "statistics",
    Kind.SUM_H: "total",
    Kind.SUM_E: "total",
}

PerStage: TypeAlias = float | Sequence[float]
Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Costs:
    """Seconds (or any unit) that actions take: one number for all stages, or one for each.

    Attributes:
        forward: F.
        backward: B, both halves.
        input_gradient: I; half of `backward` if not given, or what `weight_gradient` leaves of it.
        weight_gradient: W; what `input_gradient` leaves of `backward` if not given.
        comm: the hand-over between stage s and s + 1, either way, where they are on different ranks (the last
            stage's number is not used).
        meta: the hand-over of sizes, likewise.
        reduce: REDUCE of a stage.
        tie: TIE of a stage.
        logits: S of a rank; these six are one number, or one for each stage (that of the rank's first stage counts).
        head_gradient: T, likewise.
        embedding_gradient: G, likewise.
        broadcast: CAST_H and CAST_E, likewise.
        statistics: STATS, likewise.
        total: SUM_H and SUM_E, likewise.
        scatter: SCATTER of a stage.
        gather: GATHER of a stage.
        norm: NORM.
        step: STEP of a stage; UNDO takes as long. A FREE takes no time.
        offload: OFFLOAD of a stage; one after the other, beside everything else.
        reload: RELOAD of a stage, likewise.

    Raises:
        CostError: a value is no duration: not a number, not finite, or negative.
    """

    forward: PerStage
    backward: PerStage
    input_gradient: PerStage | None = None
    weight_gradient: PerStage | None = None
    comm: PerStage = 0.0
    meta: PerStage = 0.0
    reduce: PerStage = 0.0
    tie: PerStage = 0.0
    logits: PerStage = 0.0
    head_gradient: PerStage = 0.0
    embedding_gradient: PerStage = 0.0
    broadcast: PerStage = 0.0
    statistics: PerStage = 0.0
    total: PerStage = 0.0
    scatter: PerStage = 0.0
    gather: PerStage = 0.0
    norm: PerStage = 0.0
    step: PerStage = 0.0
    offload: PerStage = 0.0
    reload: PerStage = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                object.__setattr__(self, field.name, _durations(field.name, value))

    @property
    def stages(self) -> int | None:
        """The number of stages that the costs are for; None if they fit any number."""
        given = (getattr(self, field.name) for field in fields(self))
        return next((len(value) for value in given if isinstance(value, tuple)), None)

    def table(self, num_stages: int) -> Seconds:
        """Seconds of every kind on every stage, ``[kinds, stages]``; of a message: of its hand-over.

        Raises:
            CostError: a cost is for another number of stages, or a half of the backward takes longer than the whole.
        """
        rows = {field.name: self._row(field.name, num_stages) for field in fields(self)}
        inputs, weights = self._halves(rows)
        table = np.zeros((len(Kind), num_stages))
        table[Kind.F], table[Kind.B], table[Kind.I], table[Kind.W] = rows["forward"], rows["backward"], inputs, weights
        for kind, name in _VOCABULARY.items():
            table[kind] = rows[name]
        for kind in (Kind.REDUCE, Kind.TIE, Kind.SCATTER, Kind.GATHER, Kind.NORM, Kind.STEP, Kind.OFFLOAD, Kind.RELOAD):
            table[kind] = rows[kind.name.lower()]
        table[Kind.UNDO] = rows["step"]
        for kind, (_, offset) in COUNTERPART.items():
            boundary = rows["meta" if kind in TELLS else "comm"]
            table[kind] = boundary if offset > 0 else np.roll(boundary, 1)
        return table

    def _row(self, name: str, num_stages: int) -> Seconds:
        value = getattr(self, name)
        if isinstance(value, tuple) and len(value) != num_stages:
            raise CostError(f"{name} has {len(value)} numbers for {num_stages} stages; give one, or one for each stage")
        return np.broadcast_to(np.asarray(math.nan if value is None else value, dtype=np.float64), (num_stages,))

    def _halves(self, rows: dict[str, Seconds]) -> tuple[Seconds, Seconds]:
        """The input-gradient and the weight-gradient half."""
        whole, inputs, weights = rows["backward"], rows["input_gradient"], rows["weight_gradient"]
        if self.input_gradient is None:
            inputs = whole / 2 if self.weight_gradient is None else whole - weights
        if self.weight_gradient is None:
            weights = whole - inputs
        short = np.flatnonzero((inputs < 0) | (weights < 0))
        if len(short):
            where = f"{whole[short[0]]} on stage {short[0]}"
            remedy = "give both input_gradient and weight_gradient, or a longer backward"
            raise CostError(f"half of the backward takes longer than all of it, {where}; {remedy}")
        return inputs, weights


def _durations(name: str, value: PerStage) -> PerStage:
    """The value as a float or a tuple of floats, all of them durations."""
    try:
        each = tuple(map(float, value)) if isinstance(value, Iterable) else (float(value),)
    except (TypeError, ValueError) as error:
        raise CostError(f"{name} = {value!r:.60} must be a duration, or one for each stage ({error})") from error
    if not all(math.isfinite(seconds) and seconds >= 0 for seconds in each):
        raise CostError(f"{name} = {value} must be finite and not negative: it is a duration")
    return each if isinstance(value, Iterable) else each[0]
