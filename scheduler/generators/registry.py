"""The schedules by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType

from pipert.scheduler.errors import LayoutError
from pipert.scheduler.generators.gpipe import gpipe
from pipert.scheduler.generators.interleaved import interleaved
from pipert.scheduler.generators.one_f_one_b import one_f_one_b
from pipert.scheduler.schedule import Schedule


@dataclass(frozen=True)
class Generator:
    """A schedule's entry in the registry.

    Attributes:
        make: the schedule for (ranks, micro-batches, chunks).
        summary: one line about it.
        chunked: whether it takes any number of stages a rank; otherwise exactly one.
    """

    make: Callable[[int, int, int], Schedule]
    summary: str
    chunked: bool = False


#: Every schedule that can be asked for by name.
GENERATORS: Mapping[str, Generator] = MappingProxyType(
    {
        "gpipe": Generator(lambda p, m, _: gpipe(p, m), "all forwards, then all backwards"),
        "1f1b": Generator(lambda p, m, _: one_f_one_b(p, m), "one forward, one backward: few activations live"),
        "interleaved": Generator(interleaved, "1F1B with several stages a rank: a shorter bubble", chunked=True),
    }
)


def generate(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Make a schedule by name.

    Args:
        name: one of `GENERATORS`.
        ranks: the number of pipeline ranks, ≥ 1.
        microbatches: the number of micro-batches of a step, ≥ 1.
        chunks: stages a rank, ≥ 1.

    Raises:
        LayoutError: no schedule has that name, it has none for these numbers, or a number is below 1.
    """
    generator = GENERATORS.get(name)
    if generator is None:
        near = get_close_matches(name.lower(), GENERATORS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise LayoutError(f"no schedule is called {name!r}; {hint}there are {', '.join(GENERATORS)}")
    if not generator.chunked and chunks != 1:
        many = ", ".join(known for known, entry in GENERATORS.items() if entry.chunked)
        raise LayoutError(f"{name} puts one stage on a rank, not chunks = {chunks}; use chunks = 1, or one of: {many}")
    return generator.make(ranks, microbatches, chunks)
