"""Halves of backwards are put together where nobody gains by having them apart."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipert.scheduler.action import Kind
from pipert.scheduler.costs import Costs
from pipert.scheduler.generators.registry import generate
from pipert.scheduler.search.whole import whole
from pipert.scheduler.simulate import simulate
from pipert.scheduler.verify import verify


def test_halves_are_joined_only_where_the_gradient_is_not_hurried() -> None:
    schedule = whole(generate("zb-h1", 2, 3), Costs(1, 2))
    assert [str(row) for row in schedule.rows] == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"]


@given(
    st.sampled_from(["1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dual-pipe-v"]),
    st.integers(1, 4),
    st.integers(1, 6),
    st.lists(st.integers(1, 5), min_size=24, max_size=24),
    st.integers(0, 3),
)
def test_nothing_is_later_and_no_more_is_kept(name: str, ranks: int, many: int, times: list[int], comm: int) -> None:
    schedule = generate(name, ranks, many)
    rows = [tuple(times[kind::3][: schedule.num_stages]) for kind in range(3)]
    costs = Costs(rows[0], tuple(a + b for a, b in zip(rows[1], rows[2], strict=True)), rows[1], rows[2], comm=comm)
    joined = whole(schedule, costs)
    assert verify(joined).ok
    before, after = simulate(schedule, costs), simulate(joined, costs)
    assert after.makespan <= before.makespan + 1e-9
    assert all(mine <= known for mine, known in zip(after.peaks, before.peaks, strict=True))
    begins = {action: start for _, action, start, _ in after}
    for _, action, start, _ in before:
        if action.kind is Kind.F:
            assert abs(begins[action] - start) < 1e-9
