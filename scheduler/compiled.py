"""Kernels: plain functions over flat arrays that are compiled only when there is enough work.

numba takes longer to import than a small schedule takes to check, so short inputs run as plain Python over lists
(indexing a list is several times faster than indexing an array; a memory view is in between) and long ones are compiled
once and cached on disk.
A kernel is one function: it indexes one-dimensional arrays with integers, writes results into arrays it was
given, and calls nothing but built-ins.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

#: Below this many actions compiling does not pay.
WORTH_COMPILING = 20_000


def compiled(function: Callable[..., Any], work: int, *, slices: bool = False) -> Callable[..., Any]:
    """Return `function`, compiled if it has `work` actions to go through and that pays.

    Args:
        function: a kernel.
        work: how many actions it is going to visit.
        slices: whether it writes through slices; these are views of an array, but copies of a list.

    Returns:
        A callable that takes and fills NumPy arrays as `function` would. Read-only arrays are inputs.
    """
    if work >= WORTH_COMPILING:
        return _jitted(function)
    return _over_views(function) if slices else _over_lists(function)


@cache
def _jitted(function: Callable[..., Any]) -> Callable[..., Any]:
    import numba

    result: Callable[..., Any]
    try:
        result = numba.njit(cache=True)(function)
    except RuntimeError:  # there is no directory to keep the compiled form in
        result = numba.njit(function)
    return result


@cache
def _over_lists(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        lists = [arg.tolist() if isinstance(arg, np.ndarray) else arg for arg in args]
        result = function(*lists)
        for arg, values in zip(args, lists, strict=True):
            if isinstance(arg, np.ndarray) and arg.flags.writeable:
                arg[:] = values
        return result

    return run


@cache
def _over_views(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return function(*(arg.data if isinstance(arg, np.ndarray) else arg for arg in args))

    return run
