"""The schedules by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType

from pipert.scheduler.errors import LayoutError
from pipert.scheduler.generators.dual_pipe_v import dual_pipe_v
from pipert.scheduler.generators.gpipe import gpipe
from pipert.scheduler.generators.interleaved import interleaved
from pipert.scheduler.generators.looped_bfs import looped_bfs
from pipert.scheduler.generators.one_f_one_b import eager_one_f_one_b, one_f_one_b
from pipert.scheduler.generators.v_shape import v_half, v_min
from pipert.scheduler.generators.zb_v import zb_v
from pipert.scheduler.generators.zero_bubble import zb_h1, zb_h2
from pipert.scheduler.schedule import Schedule


@dataclass(frozen=True)
class Generator:
    """A schedule's entry in the registry.

    Attributes:
        make: the schedule for (ranks, micro-batches, chunks).
        summary: one line about it.
        chunked: whether it takes any number of stages a rank.
        stages: if not, how many it puts on each.
        grouped: the schedule for (ranks, micro-batches, chunks, micro-batches of a group), if it has groups.
    """

    make: Callable[[int, int, int], Schedule]
    summary: str
    chunked: bool = False
    stages: int = 1
    grouped: Callable[[int, int, int, int], Schedule] | None = None


#: Every schedule that can be asked for by name.
GENERATORS: Mapping[str, Generator] = MappingProxyType(
    {
        "gpipe": Generator(lambda p, m, _: gpipe(p, m), "all forwards, then all backwards"),
        "1f1b": Generator(lambda p, m, _: one_f_one_b(p, m), "one forward, one backward: few activations live"),
        "interleaved": Generator(
            interleaved, "1F1B with several stages a rank: a shorter bubble", chunked=True, grouped=interleaved
        ),
        "1f1b-eager": Generator(lambda p, m, _: eager_one_f_one_b(p, m), "1F1B with more forwards ahead"),
        "looped-bfs": Generator(looped_bfs, "GPipe with several stages a rank, stage by stage", chunked=True),
        "zb-h1": Generator(lambda p, m, _: zb_h1(p, m), "1F1B's memory, weight gradients fill a part of the bubble"),
        "zb-h2": Generator(lambda p, m, _: zb_h2(p, m), "twice that memory, weight gradients fill the bubble"),
        "zb-v": Generator(lambda p, m, _: zb_v(p, m), "in a V: 1F1B's memory, no bubble", stages=2),
        "v-half": Generator(lambda p, m, _: v_half(p, m), "in a V: half the memory, half the bubble", stages=2),
        "v-min": Generator(lambda p, m, _: v_min(p, m), "in a V: a third of the memory", stages=2),
        "dual-pipe-v": Generator(lambda p, m, _: dual_pipe_v(p, m), "in a V: forwards beside backwards", stages=2),
    }
)


def generate(name: str, ranks: int, microbatches: int, chunks: int = 1, group: int | None = None) -> Schedule:
    """Make a schedule by name.

    Args:
        name: one of `GENERATORS`.
        ranks: the number of pipeline ranks, ≥ 1.
        microbatches: the number of micro-batches of a step, ≥ 1.
        chunks: stages a rank, ≥ 1; may be left at 1 for a schedule that has its own number.
        group: of ``interleaved``, how many micro-batches a rank takes through one stage before it turns to the next,
            ≥ ranks; left out, as few as can be.

    Raises:
        LayoutError: no schedule has that name, it has none for these numbers, or a number is below 1.
    """
    generator = GENERATORS.get(name)
    if generator is None:
        near = get_close_matches(name.lower(), GENERATORS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise LayoutError(f"no schedule is called {name!r}; {hint}there are {', '.join(GENERATORS)}")
    if not generator.chunked and chunks not in (1, generator.stages):
        many = ", ".join(known for known, entry in GENERATORS.items() if entry.chunked)
        own = "one stage" if generator.stages == 1 else f"{generator.stages} stages"
        remedy = f"use chunks = {generator.stages}, or one of: {many}"
        raise LayoutError(f"{name} puts {own} on a rank, not chunks = {chunks}; {remedy}")
    if group is None:
        return generator.make(ranks, microbatches, chunks)
    if generator.grouped is None:
        many = ", ".join(known for known, entry in GENERATORS.items() if entry.grouped)
        raise LayoutError(f"{name} has no groups of micro-batches, so no group = {group}; leave it out, or use {many}")
    return generator.grouped(ranks, microbatches, chunks, group)
