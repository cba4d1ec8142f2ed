"""1F1B by its recurrence: the figures of the simulator, in O(ranks) memory and without the steps that repeat."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipert.scheduler import compiled
from pipert.scheduler.costs import Costs
from pipert.scheduler.errors import CostError, LayoutError
from pipert.scheduler.generators.one_f_one_b import one_f_one_b
from pipert.scheduler.recurrence import simulate_1f1b
from pipert.scheduler.simulate import simulate
from pipert.scheduler.summary import Summary

quarters = st.integers(0, 20).map(lambda number: number / 4)
fractions = st.floats(0, 8, allow_subnormal=False)


@st.composite
def pipelines(draw: st.DrawFn, times: st.SearchStrategy[float]) -> tuple[int, int, Costs]:
    """Ranks, micro-batches, and costs that differ from stage to stage."""
    ranks = draw(st.integers(1, 7))
    forward, backward, comm = (draw(st.lists(times, min_size=ranks, max_size=ranks)) for _ in range(3))
    return ranks, draw(st.integers(1, 50)), Costs(forward, backward, comm=comm)


def expected(ranks: int, microbatches: int, costs: Costs, blocking: bool) -> Summary:
    return simulate(one_f_one_b(ranks, microbatches), costs, blocking=blocking).summary()


@given(pipelines(quarters), st.booleans(), st.booleans())
@example((8, 50, Costs(1, 2, comm=2)), False, True)
def test_binary_fractions_give_the_simulators_figures_to_the_last_bit(
    pipeline: tuple[int, int, Costs], blocking: bool, jump: bool
) -> None:
    assert simulate_1f1b(*pipeline, blocking=blocking, jump=jump) == expected(*pipeline, blocking)


@given(pipelines(fractions), st.booleans())
def test_other_times_give_them_up_to_rounding(pipeline: tuple[int, int, Costs], blocking: bool) -> None:
    found, wanted = simulate_1f1b(*pipeline, blocking=blocking), expected(*pipeline, blocking)
    assert found.makespan == pytest.approx(wanted.makespan, rel=1e-12)
    near = 1e-12 * (1 + wanted.makespan)  # these are differences of times
    assert found.busy == pytest.approx(wanted.busy, abs=near)
    assert found.idle_within == pytest.approx(wanted.idle_within, abs=near)
    assert found.peaks == wanted.peaks


@given(pipelines(quarters) | pipelines(fractions), st.booleans(), st.booleans())
@settings(max_examples=40)
def test_the_compiled_kernel_is_the_plain_one(pipeline: tuple[int, int, Costs], blocking: bool, jump: bool) -> None:
    plain = simulate_1f1b(*pipeline, blocking=blocking, jump=jump)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "WORTH_COMPILING", 0)
        assert simulate_1f1b(*pipeline, blocking=blocking, jump=jump) == plain


@pytest.mark.parametrize("ranks", [1, 2, 7, 64])
def test_jumping_over_what_repeats_changes_nothing(ranks: int) -> None:
    draw = np.random.default_rng(ranks)
    costs = Costs(*draw.uniform(0.5, 2, (2, ranks)).tolist(), comm=draw.uniform(0, 0.5, ranks).tolist())
    assert simulate_1f1b(ranks, 20_000, costs) == simulate_1f1b(ranks, 20_000, costs, jump=False)


def test_equal_steps_are_no_reason_to_jump() -> None:
    """Seven micro-batches in a row take 7 more each, the eighth 3: messages go around the ranks in the rhythm of eight.

    Whoever extrapolates from the equal steps is wrong by 7 %.
    """
    ranks, costs = 8, Costs(1, 2, comm=2)
    steps = np.diff([simulate_1f1b(ranks, microbatches, costs).makespan for microbatches in range(2, 19)])
    assert steps.tolist() == [7, 7, 7, 7, 7, 7, 7, 3, 7, 7, 7, 7, 7, 7, 7, 3]
    many = simulate_1f1b(ranks, 4096, costs).makespan
    assert many == simulate(one_f_one_b(ranks, 4096), costs).makespan
    assert many < 0.94 * 7 * 4096


def test_the_whole_state_must_return_and_not_what_one_rank_sees() -> None:
    """Two equal steps everywhere, and yet later ones differ: some instances of every size, against the simulator."""
    draw, misleading = np.random.default_rng(0), 0
    for _ in range(60):
        ranks = int(draw.integers(3, 9))
        costs = Costs(*draw.integers(1, 6, (2, ranks)).tolist(), comm=draw.integers(0, 4, ranks).tolist())
        made = simulate(one_f_one_b(ranks, 120), costs)
        steps = np.array(
            [np.diff(made.lane(rank).ends[made.lane(rank).codes >> 28 & 255 == 1]) for rank in range(ranks)]
        )
        equal = (steps[:, 1:60] == steps[:, :59]).all(axis=0)
        misleading += bool(equal.any() and not equal[int(np.argmax(equal)) :].all())
        assert simulate_1f1b(ranks, 120, costs).makespan == made.makespan
    assert misleading > 5


def test_hundreds_of_millions_of_microbatches_take_neither_time_nor_memory() -> None:
    simulate_1f1b(16, 20_000, Costs(1, 2, comm=0.25))  # compiles
    tracemalloc.start()
    found = simulate_1f1b(16, 200_000_000, Costs(1, 2, comm=0.25))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert found.num_actions == 6_400_000_000
    assert found.bubble == pytest.approx(1 - 3 / (3 + 2 * 0.25 * 15 / 16))


def test_a_step_that_takes_no_time_has_no_bubble() -> None:
    assert simulate_1f1b(3, 5, Costs(0, 0)) == Summary("1f1b", 30, 0.0, (0.0,) * 3, (0.0,) * 3, (3, 2, 1))
    assert simulate_1f1b(3, 5, Costs(0, 0)).bubble == 0


def test_what_cannot_be_simulated_is_refused() -> None:
    with pytest.raises(LayoutError, match="ranks = 0 must be an integer >= 1"):
        simulate_1f1b(0, 1, Costs(1, 2))
    with pytest.raises(LayoutError, match="microbatches = -1"):
        simulate_1f1b(1, -1, Costs(1, 2))
    with pytest.raises(CostError, match="forward has 3 numbers for 2 stages"):
        simulate_1f1b(2, 8, Costs((1, 2, 3), 2))
