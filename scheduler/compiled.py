"""Kernels: plain functions over flat arrays that are compiled only when there is enough work.

numba takes longer to import than a small schedule takes to check, so short inputs run as plain Python over lists
(indexing a list is several times faster than indexing an array; a memory view is in between) and long ones are compiled
once and cached on disk.
A kernel is a function that indexes one-dimensional arrays with integers, writes results into arrays it was given, and
calls nothing but built-ins and other kernels of its module.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
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
    linked = _linked(function)
    try:
        result = numba.njit(cache=True)(linked)
    except RuntimeError:  # there is no directory to keep the compiled form in
        result = numba.njit(linked)
    return result


def _linked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the compiled forms of the kernels that it calls in their places."""
    assert isinstance(function, FunctionType)
    names = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    calls = {
        name: _jitted(value)
        for name, value in names.items()
        if isinstance(value, FunctionType) and value.__module__ == function.__module__
    }
    if not calls:
        return function
    code, scope = function.__code__, {**function.__globals__, **calls}
    linked = FunctionType(code, scope, function.__name__, function.__defaults__, function.__closure__)
    linked.__qualname__, linked.__module__ = function.__qualname__, function.__module__
    return linked


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
