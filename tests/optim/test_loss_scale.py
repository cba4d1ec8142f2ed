"""The loss scale halves after an overflow, rises after many good updates, and its state resumes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipert.errors import ConfigError
from pipert.optim import LossScale, LossScaler


def test_an_overflow_halves_the_scale_once_and_skips_the_update() -> None:
    scaler = LossScaler(LossScale())
    decision = scaler.decide(math.inf, 1.0)
    assert (decision.apply, decision.scale) == (False, 2.0**16)
    assert (scaler.scale, scaler.good, scaler.skipped) == (2.0**15, 0, 1)
    assert scaler.decide(2.0).apply
    assert scaler.scale == 2.0**15


def test_nan_is_an_overflow_too() -> None:
    scaler = LossScaler(LossScale(initial=4.0))
    assert not scaler.decide(math.nan).apply
    assert scaler.scale == 2.0


def test_it_rises_after_as_many_good_updates_as_configured_and_no_skip_between() -> None:
    scaler = LossScaler(LossScale(initial=4.0, interval=3))
    for norm in (1.0, 1.0, math.inf, 1.0, 1.0):
        scaler.decide(norm)
    assert scaler.scale == 2.0
    scaler.decide(1.0)
    assert scaler.scale == 4.0


def test_without_a_configuration_it_is_1_and_stays() -> None:
    scaler = LossScaler()
    for norm in (math.inf, *[1.0] * 3000):
        scaler.decide(norm)
    assert scaler.scale == 1.0


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 4))
def test_it_stays_a_power_of_2_within_its_limits_and_resumes(good: list[bool], interval: int) -> None:
    config = LossScale(initial=8.0, interval=interval, least=2.0, most=32.0)
    one, other = LossScaler(config), LossScaler(config)
    for number, fine in enumerate(good):
        other.load_state_dict(one.state_dict())
        decisions = {scaler.decide(1.0 if fine else math.nan, 0.5) for scaler in (one, other)} if fine else set()
        if not fine:
            one.decide(math.nan)
            other.decide(math.nan)
        assert len(decisions) <= 1, number
        assert one.state_dict() == other.state_dict()
        assert 2.0 <= one.scale <= 32.0
        assert math.frexp(one.scale)[0] == 0.5


@pytest.mark.parametrize(("norm", "limit", "factor"), [(5.0, 1.0, 0.2), (0.5, 1.0, 1.0), (5.0, None, 1.0)])
def test_gradients_are_clipped_as_torch_does(norm: float, limit: float | None, factor: float) -> None:
    assert LossScaler().decide(norm, limit).factor == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize(
    "wrong",
    [{"initial": 3.0}, {"factor": 0.5}, {"interval": 0}, {"least": 2.0**20}, {"initial": math.inf}, {"most": 0.0}],
)
def test_impossible_scales_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"loss scale|least <= initial"):
        LossScale(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "state", [{}, {"scale": 3.0, "good": 0, "skipped": 0}, {"scale": 4.0, "good": -1, "skipped": 0}]
)
def test_an_impossible_state_is_refused_and_changes_nothing(state: dict[str, float]) -> None:
    scaler = LossScaler(LossScale())
    before = scaler.state_dict()
    with pytest.raises(ConfigError, match="no state of a loss scale"):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before


@pytest.mark.parametrize("limit", [0, -1.0, "1", True])
def test_a_norm_that_is_no_limit_is_refused_before_anything_moves(limit: object) -> None:
    scaler = LossScaler(LossScale())
    with pytest.raises(ConfigError, match="must be a positive number"):
        scaler.decide(math.inf, limit)  # type: ignore[arg-type]
    assert scaler.skipped == 0
