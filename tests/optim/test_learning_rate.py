"""The learning rate rises, falls and ends where it should."""

from __future__ import annotations

import itertools
import math
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipert.errors import ConfigError
from pipert.optim import LearningRate


def test_warm_up_rises_in_equal_steps_to_the_peak() -> None:
    rate = LearningRate(1.0, "linear", warmup=4, length=12)
    assert [rate(update) for update in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_each_shape_is_its_formula() -> None:
    linear = LearningRate(2.0, "linear", warmup=10, length=20, final=0.5)
    assert [linear(update) for update in (10, 15, 20, 1000)] == pytest.approx([2.0, 1.5, 1.0, 1.0])
    cosine = LearningRate(2.0, "cosine", warmup=10, length=20, final=0.1)
    half = 2.0 * (0.1 + 0.9 * (0.5 + 0.5 * math.cos(math.pi * 0.3)))
    assert [cosine(update) for update in (10, 13, 20, 21)] == pytest.approx([2.0, half, 0.2, 0.2])
    constant = LearningRate(2.0, warmup=2, length=2)
    assert [constant(update) for update in (0, 1, 2, 10**9)] == [1.0, 2.0, 2.0, 2.0]


@given(
    shape=st.sampled_from(["cosine", "linear", "constant"]),
    warmup=st.integers(0, 20),
    more=st.integers(0, 50),
    final=st.floats(0, 1),
)
def test_it_rises_to_the_peak_then_never_rises_and_stays_within(
    shape: Literal["cosine", "linear", "constant"], warmup: int, more: int, final: float
) -> None:
    rate = LearningRate(3.0, shape, warmup, warmup + more, final)
    rates = [rate(update) for update in range(warmup + more + 5)]
    assert all(a <= b for a, b in itertools.pairwise(rates[: warmup + 1]))
    assert all(a >= b for a, b in itertools.pairwise(rates[warmup:]))
    assert all(0 <= r <= 3.0 + 1e-12 for r in rates)
    if more and shape != "constant":
        assert rates[-1] == pytest.approx(3.0 * final)


def test_impossible_schedules_are_refused() -> None:
    with pytest.raises(ConfigError, match="warmup 5 and length 4"):
        LearningRate(1.0, "cosine", warmup=5, length=4)
    with pytest.raises(ConfigError, match="no learning-rate shape is called 'step'"):
        LearningRate(1.0, "step")  # type: ignore[arg-type]
