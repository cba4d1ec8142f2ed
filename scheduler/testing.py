"""Property tests of schedules, for anybody's: hypothesis strategies and one assertion.

It needs hypothesis (``pip install hypothesis``), which is imported when a strategy is asked for.

::

    from pipert.scheduler.testing import assert_schedule_ok

    def test_my_schedule_is_safe_on_every_layout():
        assert_schedule_ok(my_generator, transport="nccl-pair")     # my_generator(ranks, microbatches, chunks)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from pipert.scheduler.action import Kind
from pipert.scheduler.costs import Costs, PerStage
from pipert.scheduler.errors import LayoutError, ScheduleError
from pipert.scheduler.generators.registry import GENERATORS, generate
from pipert.scheduler.lower import lower
from pipert.scheduler.program import Program
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.semantics import NAMED, Semantics
from pipert.scheduler.simulate import simulate
from pipert.scheduler.transports import transport as named_transport
from pipert.scheduler.verify import verify

if TYPE_CHECKING:
    from hypothesis import strategies as st

#: Makes a schedule or program from ranks, micro-batches and, if it has a third parameter, stages a rank.
Generator = Callable[..., Schedule | Program]


def ranks(most: int = 16) -> st.SearchStrategy[int]:
    """Numbers of ranks from 1 on; shrinks to 1."""
    return _whole(most)


def microbatches(most: int = 40) -> st.SearchStrategy[int]:
    """Numbers of micro-batches from 1 on; shrinks to 1."""
    return _whole(most)


def chunks(most: int = 4) -> st.SearchStrategy[int]:
    """Numbers of stages a rank from 1 on; shrinks to 1."""
    return _whole(most)


def durations() -> st.SearchStrategy[float]:
    """Durations that add up without rounding: quarters from 0 to 5."""
    return _whole(21).map(lambda quarters: (quarters - 1) / 4)


def costs(stages: int) -> st.SearchStrategy[Costs]:
    """Costs for so many stages: of forwards, halves of the backward, and messages; equal on all stages or not."""
    from hypothesis import strategies

    each = durations() | strategies.lists(durations(), min_size=stages, max_size=stages)

    def built(forward: PerStage, inputs: PerStage, weights: PerStage, comm: PerStage) -> Costs:
        halves = Costs(forward, 0, inputs, weights).table(stages)
        whole = [float(halves[Kind.I, stage] + halves[Kind.W, stage]) for stage in range(stages)]
        return Costs(forward, whole, inputs, weights, comm)

    return strategies.builds(built, each, each, each, each)


def transports(**rules: Any) -> st.SearchStrategy[Semantics]:
    """The transports that have names.

    Args:
        rules: fields of `Semantics` that they must have, for example ``matching="order"``.
    """
    from hypothesis import strategies

    chosen = [one for one in NAMED.values() if all(getattr(one, name) == value for name, value in rules.items())]
    return strategies.sampled_from(chosen)


def schedules(
    names: Sequence[str] = tuple(GENERATORS), *, most_ranks: int = 16, most_microbatches: int = 40, most_chunks: int = 4
) -> st.SearchStrategy[Schedule]:
    """What pipert's own generators make, up to a size.

    Args:
        names: of the generators.
        most_ranks: the largest number of ranks.
        most_microbatches: the largest number of micro-batches.
        most_chunks: the largest number of stages a rank, of those that take any.
    """
    from hypothesis import strategies

    def layouts(name: str) -> st.SearchStrategy[Schedule]:
        own = chunks(most_chunks) if GENERATORS[name].chunked else strategies.just(1)
        return strategies.builds(
            generate, strategies.just(name), ranks(most_ranks), microbatches(most_microbatches), own
        )

    return strategies.sampled_from(tuple(names)).flatmap(layouts)


def assert_schedule_ok(
    target: Generator | Schedule | Program | str,
    *,
    transport: str | Semantics | Sequence[str | Semantics] | None = None,
    limits: Callable[..., int | Sequence[int]] | int | Sequence[int] | None = None,
    in_order: bool = False,
    most_ranks: int = 8,
    most_microbatches: int = 16,
    most_chunks: int = 3,
    examples: int = 100,
) -> None:
    """Assert that a schedule is safe, or that a generator's are on every layout up to a size.

    Each schedule is verified, lowered for the transports, verified again and simulated; a program is judged as it is
    under the rules of each. Layouts are searched by hypothesis, the same ones in every run, and a failure is shrunk to
    the smallest layout that fails: first the fewest ranks, then micro-batches, then stages a rank. Layouts that the
    generator refuses with `ValueError` (as `LayoutError` is one) are left out.

    Args:
        target: a schedule, a program, the name of one of pipert's schedules, or a function of (ranks, micro-batches)
            or (ranks, micro-batches, stages a rank) that makes one.
        transport: the transport's name or message rules, or several; all that have names if left out.
        limits: how many micro-batches of a rank's stages may be live at once, as for `verify`; or a function of the
            same arguments as the generator.
        in_order: whether every stage must add its weights' gradients in the order of the micro-batches, so that sums
            have the bits of one process.
        most_ranks: the largest number of ranks that is tried.
        most_microbatches: likewise of micro-batches.
        most_chunks: likewise of stages a rank.
        examples: how many layouts are tried at most.

    Raises:
        AssertionError: something is unsafe; the message has the smallest layout and the picture of the fault.
        LayoutError: the generator refuses every layout, or no schedule or transport is called that.
    """
    rules = _rules(transport)

    def judge(made: Schedule | Program, title: str = "", layout: tuple[int, ...] = ()) -> None:
        _require(title, made, rules, limits(*layout) if callable(limits) else limits, in_order)

    if isinstance(target, Schedule | Program):
        judge(target)
        return
    make, takes_chunks = _generator(target)
    sizes = (most_ranks, most_microbatches, most_chunks if takes_chunks else 1)
    _search(make, judge, sizes, examples, 3 if takes_chunks else 2)


def _generator(target: Generator | str) -> tuple[Generator, bool]:
    """The function, and whether it takes stages a rank."""
    if isinstance(target, str):
        name = target
        generate(name, 1, 1)  # refuses a name that there is not
        return lambda *layout: generate(name, *layout), GENERATORS[name].chunked
    if not callable(target):
        raise LayoutError(f"{target!r} makes no schedule; give a schedule, a program, a name, or a function")
    needed = [
        parameter
        for parameter in inspect.signature(target).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    return target, len(needed) >= 3 or any(parameter.kind is parameter.VAR_POSITIONAL for parameter in needed)


def _search(
    make: Generator, judge: Callable[..., None], sizes: tuple[int, int, int], examples: int, arguments: int
) -> None:
    """Let hypothesis look for the smallest layout that fails."""
    from hypothesis import HealthCheck, Phase, given, settings

    tried, refusal = 0, ""

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(ranks(sizes[0]), microbatches(sizes[1]), chunks(sizes[2]))
    def every_layout(p: int, m: int, v: int) -> None:
        nonlocal tried, refusal
        layout = (p, m, v)[:arguments]
        try:
            made = make(*layout)
        except ValueError as error:
            refusal = refusal or str(error)
            return
        tried += 1
        words = zip(("ranks", "microbatches", "chunks"), layout, strict=False)
        title = ", ".join(f"{name} = {value}" for name, value in words)
        if not isinstance(made, Schedule | Program):
            raise AssertionError(f"{title}\nthe generator returns {made!r:.60}; return a Schedule or a Program")
        judge(made, title, layout)

    every_layout()
    if not tried:
        raise LayoutError(
            f"the generator refuses every layout up to {sizes} (ranks, micro-batches, stages a rank): {refusal}"
        )


def _rules(transport: str | Semantics | Sequence[str | Semantics] | None) -> tuple[Semantics, ...]:
    if transport is None:
        return tuple(NAMED.values())
    several = [transport] if isinstance(transport, str | Semantics) else transport
    if not several:
        raise LayoutError("no transport to test for; name one, or leave transport out for all that have names")
    return tuple(named_transport(one) if isinstance(one, str) else one for one in several)


def _require(title: str, target: Schedule | Program, rules: Sequence[Semantics], limits: Any, in_order: bool) -> None:
    """Fail with the picture of the first fault on any of the transports."""
    for found in chain(_disorder(target) if in_order else (), _faults(target, rules, limits)):
        raise AssertionError(f"{title}\n{found}" if title else found)


def _disorder(target: Schedule | Program) -> Iterator[str]:
    """The stages that add weight gradients in another order than that of the micro-batches."""
    for rank, row in enumerate(target.rows):
        last: dict[int, int] = {}
        for action in row:
            if action.kind in (Kind.B, Kind.W):
                before = last.get(action.stage, -1)
                if action.microbatch < before:
                    yield (
                        f"rank {rank}: {action} comes after the weight gradient of micro-batch {before}; "
                        "sums in another order are rounded otherwise than in one process"
                    )
                last[action.stage] = action.microbatch


def _faults(target: Schedule | Program, rules: Sequence[Semantics], limits: Any) -> Iterator[str]:
    """The pictures of what is wrong."""
    if isinstance(target, Schedule):
        proof = verify(target, limits=limits)
        if not proof.ok:
            yield str(proof)
            return
    for semantics in rules:
        try:
            program = _program(target, semantics)
            proof = verify(program, limits=limits)
            if proof.ok:
                simulate(program, Costs(1, 2, comm=0.5))
            else:
                yield str(proof)
        except ScheduleError as error:
            yield f"for {semantics.name}: {error}"


def _program(target: Schedule | Program, semantics: Semantics) -> Program:
    """A schedule lowered, a program as it is under other rules."""
    return lower(target, semantics) if isinstance(target, Schedule) else replace(target, semantics=semantics)


def _whole(most: int) -> st.SearchStrategy[int]:
    from hypothesis import strategies

    return strategies.integers(1, most)
