"""The search finds the best schedule of small pipelines, and never one that is worse than those that have names."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipert.scheduler.action import Kind
from pipert.scheduler.bounds import lower_bound
from pipert.scheduler.costs import Costs
from pipert.scheduler.errors import LayoutError
from pipert.scheduler.generators.registry import GENERATORS, generate
from pipert.scheduler.instance import Instance
from pipert.scheduler.lower import lower
from pipert.scheduler.placement import Placement
from pipert.scheduler.row import ActionRow
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.search import search
from pipert.scheduler.search.dispatch import dispatch, rules
from pipert.scheduler.search.improve import improve
from pipert.scheduler.search.periodic import extend, fewer
from pipert.scheduler.search.starts import in_halves, known
from pipert.scheduler.semantics import MPI, MPI_SYNCHRONOUS, NCCL_GROUPED, NCCL_PAIR, Semantics
from pipert.scheduler.simulate import simulate
from pipert.scheduler.verify import verify
from tests.scheduler.exact import optimum, random_costs

PLACEMENTS = {
    "linear": Placement.linear(3),
    "looped": Placement.looped(2, 2),
    "v": Placement.v(2),
    "odd": Placement.of((0, 0, 1, 0, 2, 1)),
}


def schedule(instance: Instance, rows: list[np.ndarray]) -> Schedule:
    return Schedule("found", instance.placement, instance.microbatches, tuple(map(ActionRow.from_codes, rows)))


@pytest.mark.parametrize("seed", range(8))
def test_small_pipelines_get_their_best_schedule(seed: int) -> None:
    pytest.importorskip("ortools", reason="ortools proves optimality")
    draw = random.Random(seed)
    ranks, microbatches = draw.randint(2, 4), draw.randint(2, 6)
    costs = random_costs(draw, ranks)
    for keeps in (ranks, 2 * ranks):
        found = search(costs, ranks, microbatches, limits=keeps)
        if not found.optimal:
            exact = optimum(costs, ranks, microbatches, keeps, hint=found.makespan)
            assert found.bound <= exact.makespan
            assert found.makespan == exact.makespan or (not exact.proved and found.makespan <= exact.bound * 1.03)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(sorted(PLACEMENTS)), st.integers(1, 9), st.integers(0, 6), st.integers(0, 99))
def test_what_is_found_is_safe_and_keeps_the_memory(name: str, microbatches: int, spare: int, seed: int) -> None:
    placement = PLACEMENTS[name]
    costs = random_costs(random.Random(seed), placement.num_stages)
    limits = [len(placement.stages_of(rank)) + spare for rank in range(placement.num_ranks)]
    found = search(costs, placement.num_ranks, microbatches, placement=placement, limits=limits, effort=100_000)
    assert verify(found.schedule, limits=limits).ok
    assert found.makespan == simulate(found.schedule, costs).makespan
    assert found.bound == lower_bound(costs, placement, microbatches, limits) <= found.makespan * (1 + 1e-12)
    for rank, row in enumerate(found.schedule.rows):
        for stage in placement.stages_of(rank):
            for kind in (Kind.F, Kind.I, Kind.W):
                here = (row.stages == stage) & (row.kinds == kind)
                assert row.microbatches[here].tolist() == list(range(microbatches))


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(sorted(GENERATORS)), st.integers(1, 4), st.integers(1, 10), st.integers(0, 99))
def test_no_named_schedule_with_the_same_memory_is_faster(name: str, ranks: int, microbatches: int, seed: int) -> None:
    made = generate(name, ranks, microbatches, 2 if GENERATORS[name].chunked else 1)
    costs = random_costs(random.Random(seed), made.num_stages)
    timeline = simulate(made, costs)
    found = search(costs, ranks, microbatches, placement=made.placement, limits=timeline.peaks, effort=20_000)
    assert found.makespan <= timeline.makespan * (1 + 1e-12)


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("spare", [0, 1])
def test_every_rule_ends_within_the_memory(name: str, spare: int) -> None:
    placement = PLACEMENTS[name]
    limits = [len(placement.stages_of(rank)) + spare for rank in range(placement.num_ranks)]
    for seed, microbatches in enumerate((1, 2, 5)):
        costs = random_costs(random.Random(seed), placement.num_stages)
        instance = Instance.of(costs, placement, microbatches, limits)
        for rule in rules(instance):
            verify(schedule(instance, dispatch(instance, rule)), limits=limits).require()


def test_local_search_tells_the_makespan_of_its_answer_and_only_gets_better() -> None:
    for seed, placement in enumerate(PLACEMENTS.values()):
        costs = random_costs(random.Random(seed), placement.num_stages)
        instance = Instance.of(costs, placement, 5)
        rows = dispatch(instance, next(rules(instance)))
        before = simulate(schedule(instance, rows), costs).makespan
        better, span = improve(instance, rows, seed=seed, effort=300_000, bound=0)
        assert span == pytest.approx(simulate(schedule(instance, better), costs).makespan)
        assert span <= before


def test_the_same_arguments_give_the_same_schedule() -> None:
    costs = random_costs(random.Random(5), 3)
    again = [search(costs, 3, 7, limits=3, effort=200_000, seed=4) for _ in range(2)]
    assert again[0] == again[1]


@pytest.mark.parametrize("seed", range(4))
def test_a_steady_state_may_be_repeated_any_number_of_times(seed: int) -> None:
    costs = random_costs(random.Random(seed), 3)
    instance = Instance.of(costs, Placement.linear(3), 100, 4)
    small = instance.with_microbatches(fewer(instance))
    assert small.microbatches < 60 and (100 - small.microbatches) % 12 == 0
    extended = 0
    for rule in rules(small):
        rows = dispatch(small, rule)
        timeline = simulate(schedule(small, rows), costs)
        longer = extend(small, rows, [timeline.lane(rank).starts for rank in range(3)], 100 - small.microbatches)
        if longer is not None:
            extended += 1
            verify(schedule(instance, longer), limits=4).require()
    assert extended


def test_many_microbatches_take_little_more_than_their_work() -> None:
    costs = Costs(1, 2, comm=0.1)
    found = search(costs, 4, 1000, limits=4)
    assert found.optimal
    assert found.makespan == lower_bound(costs, Placement.linear(4), 1000, 4)


def test_a_head_heavy_last_stage_and_slow_links_cost_only_what_they_must() -> None:
    heavy = Costs((1, 1, 1, 2), (2, 2, 2, 4), comm=0.5)
    found = search(heavy, 4, 16, limits=8)
    fixed = [generate("zb-h1", 4, 16), generate("zb-h2", 4, 16), generate("1f1b", 4, 16)]
    assert found.makespan <= min(simulate(one, heavy).makespan for one in fixed)
    assert found.gap < 0.01


@pytest.mark.parametrize("semantics", [MPI, MPI_SYNCHRONOUS, NCCL_PAIR])
def test_on_a_transport_the_program_counts(semantics: Semantics) -> None:
    costs = Costs((3, 5, 4), (9, 8, 7), (4, 4, 3), (5, 4, 4), comm=2)
    found = search(costs, 3, 5, limits=3, semantics=semantics)
    named = lower(generate("zb-h1", 3, 5), semantics)
    assert found.bound <= found.makespan <= simulate(named, costs).makespan
    assert found.program is not None and verify(found.program).ok
    assert found.program.schedule == found.schedule
    assert found.makespan == simulate(found.program, costs).makespan


@pytest.mark.parametrize("semantics", [NCCL_PAIR, NCCL_GROUPED])
def test_on_a_transport_no_known_schedule_with_whole_backwards_is_faster(semantics: Semantics) -> None:
    costs = Costs(1, 2, comm=3)
    for microbatches in (2, 3):
        named = simulate(lower(generate("1f1b", 2, microbatches), semantics), costs)
        found = search(costs, 2, microbatches, limits=named.peaks, semantics=semantics, effort=100_000)
        assert found.bound <= found.makespan <= named.makespan


def test_whole_backwards_that_take_less_than_their_halves_do_not_go_below_the_bound() -> None:
    costs = Costs(1, 2, 2, 1, comm=0.5)
    found = search(costs, 2, 4, limits=2, semantics=NCCL_PAIR, effort=100_000)
    assert found.bound <= found.makespan


def test_known_schedules_are_taken_in_halves() -> None:
    halves = in_halves(generate("1f1b", 2, 2).rows[1].codes)
    assert str(ActionRow.from_codes(halves)) == "1F0 1I0 1W0 1F1 1I1 1W1"
    names = len(list(known(Instance.of(Costs(1, 2), Placement.linear(4), 8))))
    assert names == len(list(known(Instance.of(Costs(1, 2), Placement.linear(4), 8, 8))))
    assert 0 < len(list(known(Instance.of(Costs(1, 2), Placement.linear(4), 8, 4)))) < names


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(LayoutError, match="the placement is on 3 ranks, not ranks = 4"):
        search(Costs(1, 2), 4, 4, placement=Placement.linear(3))
    with pytest.raises(LayoutError, match="rank 0 may keep 0 activations, but one micro-batch needs 1"):
        search(Costs(1, 2), 4, 4, limits=0)
    with pytest.raises(LayoutError, match="microbatches"):
        search(Costs(1, 2), 4, 0)


def test_a_limit_may_be_any_whole_number_and_nothing_else() -> None:
    most = search(Costs(1, 2), 2, 4)
    assert search(Costs(1, 2), 2, 4, limits=10**30) == search(Costs(1, 2), 2, 4, limits=[10**30] * 2) == most
    assert search(Costs(1, 2), 2, 4, limits=np.int64(2)) == search(Costs(1, 2), 2, 4, limits=2)  # type: ignore[arg-type]
    for wrong in (2.0, True, "2"):
        with pytest.raises(LayoutError, match=r"limits = .* for 2 ranks; give one integer, or one for each rank"):
            search(Costs(1, 2), 2, 4, limits=wrong)  # type: ignore[arg-type]


def test_the_answer_says_how_good_it_is() -> None:
    found = search(Costs(1, 2), 2, 4, limits=2)
    assert str(found) == "auto: makespan 13, bound 13: no schedule is faster"
    assert (found.gap, found.optimal) == (0, True)
