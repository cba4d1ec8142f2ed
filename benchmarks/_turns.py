"""Contestants that take turns, step by step, in one job of MPI ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import pipert


def take_turns(
    mesh: pipert.Mesh,
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    after: Callable[[str], object] = lambda name: None,
) -> dict[str, float]:
    """The median seconds of a step of every contestant; see `all_turns`."""
    return {name: median(values) for name, values in all_turns(mesh, contestants, rounds, after).items()}


def ratio(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """The median over rounds of what one contestant took over what another took in the same round.

    A shared machine is fast and slow by turns; within a round it is nearly the same for all.
    """
    return median(a / b for a, b in zip(mine, theirs, strict=True))


def all_turns(
    mesh: pipert.Mesh,
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    after: Callable[[str], object] = lambda name: None,
) -> dict[str, list[float]]:
    """The seconds of every step of every contestant; the one that begins changes from round to round.

    A step lasts from the moment at which every rank stands ready until the last rank is done. The first round warms up.

    Args:
        mesh: all ranks.
        contestants: one step of each; every rank gives the same names.
        rounds: steps of each that count.
        after: called after every step that counts, outside its time.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(rounds + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            mesh.world.barrier()
            start = time.perf_counter()
            contestants[name]()
            mesh.world.barrier()
            if number:
                seconds[name].append(time.perf_counter() - start)
                after(name)
    return seconds
