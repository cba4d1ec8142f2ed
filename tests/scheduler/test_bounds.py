"""Lower bounds hold for every schedule, and the best schedules reach them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipert.scheduler.action import Kind
from pipert.scheduler.bounds import lower_bound, makespan_bound, path_bound, rank_bound
from pipert.scheduler.costs import Costs
from pipert.scheduler.errors import LayoutError
from pipert.scheduler.generators.registry import generate
from pipert.scheduler.instance import Instance
from pipert.scheduler.lower import lower
from pipert.scheduler.lower.updates import update_program
from pipert.scheduler.placement import Placement
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.semantics import MPI
from pipert.scheduler.simulate import simulate
from tests.scheduler.exact import optimum, random_costs
from tests.scheduler.layouts import schedules

durations = st.integers(0, 20).map(lambda quarters: quarters / 4)


@given(schedules(ranks=6, chunks=3, microbatches=10), st.data())
def test_no_schedule_is_faster_than_its_bound(schedule: Schedule, data: st.DataObject) -> None:
    each = st.lists(durations, min_size=schedule.num_stages, max_size=schedule.num_stages)
    costs = Costs(*(data.draw(each | durations) for _ in range(2)), comm=data.draw(each | durations))
    assert makespan_bound(schedule, costs) <= simulate(schedule, costs).makespan + 1e-9


@given(schedules(ranks=5, chunks=3, microbatches=6), st.data())
def test_no_program_is_faster_than_its_bound_whatever_part_of_its_schedule_it_runs(
    made: Schedule, data: st.DataObject
) -> None:
    costs = Costs(data.draw(durations), data.draw(durations), comm=data.draw(durations))
    program = lower(made, MPI, trainable_from=data.draw(st.integers(0, made.num_stages)))
    assert makespan_bound(program, costs) <= simulate(program, costs).makespan + 1e-9


def test_a_program_s_bound_counts_only_the_work_that_it_runs() -> None:
    made = generate("gpipe", 4, 8)
    assert makespan_bound(lower(made, MPI, trainable_from=4), Costs(1, 2)) == 11  # an evaluation
    assert makespan_bound(lower(made, MPI, trainable_from=3), Costs(1, 2)) == 3 + 8 * 3
    assert makespan_bound(update_program(made.placement, MPI, [Kind.STEP]), Costs(1, 2)) == 0


@given(st.integers(1, 8), st.integers(0, 20))
def test_several_schedules_reach_the_bound(ranks: int, extra: int) -> None:
    for name in ("gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-v"):
        made = generate(name, ranks, 2 * ranks + extra, 2 if name in ("interleaved", "looped-bfs") else 1)
        assert makespan_bound(made, Costs(1, 2)) == simulate(made, Costs(1, 2)).makespan


def test_one_microbatch_takes_the_whole_way() -> None:
    assert makespan_bound(generate("1f1b", 3, 1), Costs((1, 2, 3), (4, 5, 6), comm=(0.5, 0.25, 9))) == 21 + 1.5
    assert makespan_bound(generate("zb-v", 2, 1), Costs(1, 2, comm=1)) == 4 + 4 + 1 + 4


@given(schedules(ranks=6, chunks=3, microbatches=10), st.data())
def test_no_schedule_within_its_memory_is_faster_than_the_bound(schedule: Schedule, data: st.DataObject) -> None:
    each = st.lists(durations, min_size=schedule.num_stages, max_size=schedule.num_stages)
    forward, inputs, weights, comm = (data.draw(each) for _ in range(4))
    whole = [one + other for one, other in zip(inputs, weights, strict=True)]
    costs = Costs(forward, whole, inputs, weights, comm)
    timeline = simulate(schedule, costs)
    bound = lower_bound(costs, schedule.placement, schedule.microbatches, timeline.peaks)
    assert bound <= timeline.makespan + 1e-9
    assert lower_bound(costs, schedule.placement, schedule.microbatches) <= bound + 1e-9


@pytest.mark.parametrize("seed", range(8))
def test_the_optimum_is_not_below_the_bound(seed: int) -> None:
    pytest.importorskip("ortools", reason="ortools proves optimality")
    draw = random.Random(seed)
    ranks, microbatches = draw.randint(1, 3), draw.randint(1, 6)
    costs = random_costs(draw, ranks)
    for keeps in (1, ranks, 2 * ranks):
        exact = optimum(costs, ranks, microbatches, keeps)
        instance = Instance.of(costs, Placement.linear(ranks), microbatches, keeps)
        for bound in (path_bound(instance), *(rank_bound(instance, rank) for rank in range(ranks))):
            assert bound <= exact.makespan


@given(st.integers(1, 8), st.integers(0, 20))
def test_equal_times_with_1f1bs_memory_take_what_zb_h1_takes(ranks: int, extra: int) -> None:
    costs = Costs(1, 2)
    found = simulate(generate("zb-h1", ranks, ranks + extra), costs).makespan
    assert lower_bound(costs, Placement.linear(ranks), ranks + extra, ranks) == found


def test_memory_for_one_microbatch_makes_them_follow_one_another() -> None:
    costs = Costs((1, 2, 3), (4, 5, 6), (2, 3, 4), (2, 2, 2), comm=(0.5, 0.25, 0))
    once = 1 + 2 + 3 + 4 + 3 + 2 + 2 + 1.5
    assert lower_bound(costs, Placement.linear(3), 5, 1) == 5 * once


def test_without_limits_the_busiest_rank_counts() -> None:
    costs = Costs((1, 1, 10), (2, 2, 20))
    assert lower_bound(costs, Placement.linear(3), 100) == 2 + 100 * 30 + 0
    assert costs.table(3)[Kind.I, 2] == 10


def test_a_limit_below_one_microbatch_is_refused() -> None:
    with pytest.raises(LayoutError, match="rank 0 may keep 1 activations, but one micro-batch needs 2"):
        lower_bound(Costs(1, 2), Placement.v(2), 3, 1)
    with pytest.raises(LayoutError, match="give one integer, or one for each rank"):
        lower_bound(Costs(1, 2), Placement.v(2), 3, (4, 4, 4))
