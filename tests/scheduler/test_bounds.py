"""Lower bounds hold for every schedule, and the best schedules reach them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipert.scheduler.bounds import makespan_bound
from pipert.scheduler.costs import Costs
from pipert.scheduler.generators.registry import generate
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.simulate import simulate
from tests.scheduler.layouts import schedules

durations = st.integers(0, 20).map(lambda quarters: quarters / 4)


@given(schedules(ranks=6, chunks=3, microbatches=10), st.data())
def test_no_schedule_is_faster_than_its_bound(schedule: Schedule, data: st.DataObject) -> None:
    each = st.lists(durations, min_size=schedule.num_stages, max_size=schedule.num_stages)
    costs = Costs(*(data.draw(each | durations) for _ in range(2)), comm=data.draw(each | durations))
    assert makespan_bound(schedule, costs) <= simulate(schedule, costs).makespan + 1e-9


@given(st.integers(1, 8), st.integers(0, 20))
def test_several_schedules_reach_the_bound(ranks: int, extra: int) -> None:
    for name in ("gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-v"):
        made = generate(name, ranks, 2 * ranks + extra, 2 if name in ("interleaved", "looped-bfs") else 1)
        assert makespan_bound(made, Costs(1, 2)) == simulate(made, Costs(1, 2)).makespan


def test_one_microbatch_takes_the_whole_way() -> None:
    assert makespan_bound(generate("1f1b", 3, 1), Costs((1, 2, 3), (4, 5, 6), comm=(0.5, 0.25, 9))) == 21 + 1.5
    assert makespan_bound(generate("zb-v", 2, 1), Costs(1, 2, comm=1)) == 4 + 4 + 1 + 4
