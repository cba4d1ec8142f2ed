"""Kernels run as plain Python over lists while there is little to do, and compiled once there is much."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest

from pipert.scheduler import compiled as module
from pipert.scheduler.compiled import WORTH_COMPILING, compiled


def running_sum(values: Any, total: Any, start: int) -> int:
    """A kernel: fills `total` with the sums of `values` up to each place and returns the last."""
    sum_so_far = start
    for i in range(len(values)):
        sum_so_far += values[i]
        total[i] = sum_so_far
    return sum_so_far


@pytest.mark.parametrize("work", [0, WORTH_COMPILING - 1, WORTH_COMPILING])
def test_arrays_are_filled_either_way(work: int) -> None:
    values, total = np.arange(5), np.zeros(5, dtype=np.int64)
    values.flags.writeable = False
    assert compiled(running_sum, work)(values, total, 10) == 20
    assert total.tolist() == [10, 11, 13, 16, 20]


def test_little_work_runs_the_function_itself_over_lists() -> None:
    def kinds_of(values: Any, out: Any) -> None:
        out[0] = isinstance(values, list)

    out = np.zeros(1, dtype=np.bool_)
    compiled(kinds_of, 1)(np.zeros(1), out)
    assert out[0]


def test_much_work_is_compiled_once() -> None:
    assert compiled(running_sum, WORTH_COMPILING) is compiled(running_sum, 10 * WORTH_COMPILING)
    assert isinstance(compiled(running_sum, WORTH_COMPILING), numba.core.registry.CPUDispatcher)


def test_without_a_place_for_the_cache_kernels_are_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba refuses to cache where neither the installed package nor a home directory can be written to."""
    original = numba.njit

    def njit(*args: Any, **options: Any) -> Any:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available for file")
        return original(*args, **options)

    monkeypatch.setattr(numba, "njit", njit)
    module._jitted.cache_clear()
    total = np.zeros(3, dtype=np.int64)
    assert compiled(running_sum, WORTH_COMPILING)(np.arange(3), total, 0) == 3
    module._jitted.cache_clear()
