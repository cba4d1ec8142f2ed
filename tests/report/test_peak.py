"""The measured peak is a rate: it depends on the machine, not on how long was measured."""

from __future__ import annotations

import torch

from pipert.report.peak import measured_peak


def test_the_rate_does_not_depend_on_how_long_is_measured() -> None:
    short, long = (max(measured_peak(seconds, size=256) for _ in range(3)) for seconds in (0.02, 0.1))
    assert 1 / 3 < short / long < 3
    assert long > 1e8


def test_a_dtype_can_be_chosen_and_float64_is_not_faster_than_float32() -> None:
    single, double = (
        max(measured_peak(0.05, size=256, dtype=t) for _ in range(3)) for t in (torch.float32, torch.float64)
    )
    assert double < 1.5 * single
