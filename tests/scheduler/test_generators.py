"""Generators: the right work in the right order, with the idle time and memory that their papers give."""

from __future__ import annotations

from collections.abc import Callable
from inspect import cleandoc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipert.scheduler.action import Action, Kind
from pipert.scheduler.costs import Costs
from pipert.scheduler.draw.text import text as draw
from pipert.scheduler.errors import LayoutError
from pipert.scheduler.generators.gpipe import gpipe
from pipert.scheduler.generators.interleaved import group_sizes, interleaved
from pipert.scheduler.generators.looped_bfs import looped_bfs
from pipert.scheduler.generators.one_f_one_b import eager_one_f_one_b, one_f_one_b
from pipert.scheduler.generators.registry import GENERATORS, generate
from pipert.scheduler.placement import Placement
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.simulate import simulate
from pipert.scheduler.verify import verify
from tests.scheduler.layouts import schedules

ranks_, microbatches_, chunks_ = st.integers(1, 16), st.integers(1, 40), st.integers(1, 4)
# Whole numbers, so that sums are exact whatever their order.
costs_ = st.tuples(st.integers(1, 9), st.integers(1, 9))


def rows(schedule: Schedule) -> str:
    """The rows as text."""
    return "\n".join(map(str, schedule.rows))


GPIPE = """
rank 0 │F0F1F2F3··················B0━━B1━━B2━━B3━━│
rank 1 │··F0F1F2F3············B0━━B1━━B2━━B3━━····│
rank 2 │····F0F1F2F3······B0━━B1━━B2━━B3━━········│
rank 3 │······F0F1F2F3B0━━B1━━B2━━B3━━············│
        0                                       21
"""

ONE_F_ONE_B = """
rank 0 │F0F1F2F3············B0━━F4B1━━F5B2━━F6B3━━F7B4━━··B5━━··B6━━··B7━━│
rank 1 │··F0F1F2········B0━━F3B1━━F4B2━━F5B3━━F6B4━━F7B5━━··B6━━··B7━━····│
rank 2 │····F0F1····B0━━F2B1━━F3B2━━F4B3━━F5B4━━F6B5━━F7B6━━··B7━━········│
rank 3 │······F0B0━━F1B1━━F2B2━━F3B3━━F4B4━━F5B5━━F6B6━━F7B7━━············│
        0                                                               33
"""

INTERLEAVED = """
rank 0 │F0F1F0F1F2··B0━━F3B1━━F2B0━━F3B1━━··B2━━··B3━━B2━━B3━━│
rank 1 │··F0F1F0B0━━F1B1━━F2B0━━F3B1━━F2B2━━F3B3━━B2━━B3━━····│
        0                                                   27
"""

LOOPED_BFS = """
rank 0 │F0─F1─F2─F3─F0─F1─F2─F3─·········B0━━━━B1━━━━B2━━━━B3━━━━B0━━━━B1━━━━B2━━━━B3━━━━│
rank 1 │···F0─F1─F2─F3─F0─F1─F2─F3─B0━━━━B1━━━━B2━━━━B3━━━━B0━━━━B1━━━━B2━━━━B3━━━━······│
        0                                                                              27
"""

EAGER = """
rank 0 │F0F1F2F3F4F5F6······B0━━F7B1━━··B2━━··B3━━··B4━━··B5━━··B6━━··B7━━│
rank 1 │··F0F1F2F3F4····B0━━F5B1━━F6B2━━F7B3━━··B4━━··B5━━··B6━━··B7━━····│
rank 2 │····F0F1F2··B0━━F3B1━━F4B2━━F5B3━━F6B4━━F7B5━━··B6━━··B7━━········│
rank 3 │······F0B0━━F1B1━━F2B2━━F3B3━━F4B4━━F5B5━━F6B6━━F7B7━━············│
        0                                                               33
"""


@pytest.mark.parametrize(
    ("make", "numbers", "drawing", "width"),
    [
        (gpipe, (4, 4), GPIPE, 70),
        (one_f_one_b, (4, 8), ONE_F_ONE_B, 100),
        (interleaved, (2, 4, 2), INTERLEAVED, 70),
        (looped_bfs, (2, 4, 2), LOOPED_BFS, 105),
        (eager_one_f_one_b, (4, 8), EAGER, 105),
    ],
)
def test_a_schedule_looks_as_its_docstring_draws_it(
    make: Callable[..., Schedule], numbers: tuple[int, ...], drawing: str, width: int
) -> None:
    drawn = draw(simulate(make(*numbers), Costs(1, 2)), width=width)
    assert drawn == drawing.strip("\n")
    assert drawn in cleandoc(make.__doc__ or "").replace("\n    ", "\n")


def test_gpipe_does_all_forwards_then_all_backwards() -> None:
    assert rows(gpipe(2, 3)) == "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1F2 1B0 1B1 1B2"


def test_1f1b_warms_up_less_the_later_the_rank() -> None:
    assert rows(one_f_one_b(3, 4)) == (
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3\n1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3\n2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
    )


def test_interleaved_takes_turns_at_its_stages_group_by_group() -> None:
    assert rows(interleaved(2, 4, 2)) == (
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3\n"
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"
    )


def test_interleaved_takes_any_number_of_microbatches() -> None:
    assert rows(interleaved(2, 3, 2)) == (
        "0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2\n1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2"
    )


@given(schedules())
def test_every_generator_is_proved_for_any_layout(schedule: Schedule) -> None:
    verify(schedule).require()


@given(ranks_, microbatches_, chunks_)
def test_stages_are_placed_rank_after_rank(ranks: int, microbatches: int, chunks: int) -> None:
    assert interleaved(ranks, microbatches, chunks).placement == Placement.looped(ranks, chunks)
    assert gpipe(ranks, microbatches).placement == one_f_one_b(ranks, microbatches).placement == Placement.linear(ranks)


@given(schedules(ranks=6, microbatches=12))
def test_every_stage_sees_the_microbatches_in_order_forward_and_backward(schedule: Schedule) -> None:
    for row in schedule.rows:
        for stage in set(row.stages.tolist()):
            for kinds in ({Kind.F}, {Kind.B, Kind.I}, {Kind.B, Kind.W}):
                of_kind = [action.microbatch for action in row if action.stage == stage and action.kind in kinds]
                assert of_kind == list(range(schedule.microbatches))


# ---- idle time ----


@given(ranks_, microbatches_, costs_)
def test_gpipe_and_1f1b_idle_for_the_first_and_last_passage(
    ranks: int, microbatches: int, costs: tuple[int, int]
) -> None:
    forward, backward = costs
    for make in (gpipe, one_f_one_b):
        timeline = simulate(make(ranks, microbatches), Costs(forward, backward))
        assert timeline.idle == ((ranks - 1) * (forward + backward),) * ranks


@given(ranks_, microbatches_, st.integers(2, 4), costs_)
def test_interleaving_divides_the_idle_time_by_the_chunks_for_any_number_of_microbatches(
    ranks: int, microbatches: int, chunks: int, costs: tuple[int, int]
) -> None:
    forward, backward = costs  # of one stage; a rank's are `chunks` times as long
    whole, few = chunks * (forward + backward), min(ranks, microbatches)
    timeline = simulate(interleaved(ranks, microbatches, chunks), Costs(forward, backward))
    assert timeline.idle == ((ranks - few) * whole + (few - 1) * (forward + backward),) * ranks


def test_published_bubbles_for_four_ranks_and_eight_microbatches() -> None:
    whole, halves = Costs(1, 2), Costs(0.5, 1)
    assert simulate(gpipe(4, 8), whole).bubble == simulate(one_f_one_b(4, 8), whole).bubble == pytest.approx(3 / 11)
    assert simulate(interleaved(4, 8, 2), halves).bubble == pytest.approx(3 / 19)


@given(st.integers(2, 8), st.integers(1, 24), st.integers(2, 4))
def test_interleaved_hides_messages_as_long_as_a_forward_in_the_steady_phase(p: int, rounds: int, chunks: int) -> None:
    """One more round of micro-batches costs the round's work and nothing else."""

    def makespan(n: int) -> float:
        return simulate(interleaved(p, n * p, chunks), Costs(1, 1, comm=1)).makespan

    assert makespan(rounds + 2) - makespan(rounds + 1) == 2 * p * chunks


@given(ranks_, microbatches_, st.integers(1, 4), costs_)
def test_looped_bfs_idles_as_interleaved_does_with_enough_microbatches(
    ranks: int, extra: int, chunks: int, costs: tuple[int, int]
) -> None:
    timeline = simulate(looped_bfs(ranks, ranks - 1 + extra, chunks), Costs(*costs))
    assert timeline.idle == ((ranks - 1) * sum(costs),) * ranks


@given(ranks_, microbatches_, st.integers(1, 9), st.integers(0, 9))
def test_eager_forwards_cost_nothing_where_backwards_are_no_shorter(
    ranks: int, microbatches: int, forward: int, more: int
) -> None:
    costs = Costs(forward, forward + more)
    eager, plain = eager_one_f_one_b(ranks, microbatches), one_f_one_b(ranks, microbatches)
    assert simulate(eager, costs).idle == simulate(plain, costs).idle


@given(st.integers(2, 8), st.integers(16, 40), st.integers(1, 9), st.data())
def test_eager_forwards_hide_messages_in_the_steady_phase(
    ranks: int, m: int, forward: int, data: st.DataObject
) -> None:
    costs = Costs(forward, 2 * forward, comm=data.draw(st.integers(1, forward)))

    def last_round(make: Callable[[int, int], Schedule]) -> float:
        return simulate(make(ranks, m + 1), costs).makespan - simulate(make(ranks, m), costs).makespan

    assert last_round(eager_one_f_one_b) == 3 * forward
    assert sum(simulate(one_f_one_b(ranks, m), costs).idle) > sum(simulate(eager_one_f_one_b(ranks, m), costs).idle)


@given(st.integers(1, 8), microbatches_, st.integers(1, 3), st.integers(0, 9))
def test_interleaved_with_a_group_size_is_proved_and_idles_no_longer(
    ranks: int, microbatches: int, chunks: int, more: int
) -> None:
    made = interleaved(ranks, microbatches, chunks, ranks + more)
    verify(made).require()
    assert simulate(made, Costs(1, 2)).idle == simulate(interleaved(ranks, microbatches, chunks), Costs(1, 2)).idle


def test_a_group_size_is_kept_but_for_what_is_left() -> None:
    """Rank 0's forwards at its first stage run in groups; fewer than `ranks` left join the first group."""
    for group, microbatches, runs in ((4, 8, [4, 4]), (6, 16, [6, 6, 4]), (6, 14, [8, 6]), (9, 5, [5])):
        forwards = [action.stage for action in interleaved(4, microbatches, 2, group).rows[0] if action.kind is Kind.F]
        assert forwards == [stage for size in runs for stage in (0, 4) for _ in range(size)]


def test_a_group_size_may_be_asked_for_by_name() -> None:
    assert generate("interleaved", 4, 12, 2, group=6) == interleaved(4, 12, 2, group=6)
    rule = "1f1b has no groups of micro-batches, so no group = 4; leave it out, or use interleaved"
    with pytest.raises(LayoutError, match=rule):
        generate("1f1b", 4, 8, group=4)


def test_a_group_smaller_than_the_ranks_is_refused() -> None:
    with pytest.raises(LayoutError, match="group = 3 is less than ranks = 4: ranks would wait within it; use >= 4"):
        interleaved(4, 8, 2, 3)
    with pytest.raises(LayoutError, match="group = 0 must be an integer >= 1"):
        interleaved(4, 8, 2, 0)


# ---- memory ----


def test_1f1b_keeps_4_3_2_1_micro_batches_whatever_their_number() -> None:
    for microbatches in (8, 32):
        assert simulate(one_f_one_b(4, microbatches), Costs(1, 2)).peaks == (4, 3, 2, 1)


@given(ranks_, microbatches_)
def test_peak_activations_of_gpipe_and_1f1b(ranks: int, microbatches: int) -> None:
    assert simulate(gpipe(ranks, microbatches), Costs(1, 2)).peaks == (microbatches,) * ranks
    expected = tuple(min(microbatches, ranks - rank) for rank in range(ranks))
    assert simulate(one_f_one_b(ranks, microbatches), Costs(1, 2)).peaks == expected


@given(ranks_, microbatches_, chunks_)
def test_peak_activations_of_looped_bfs_and_eager_1f1b(ranks: int, microbatches: int, chunks: int) -> None:
    assert simulate(looped_bfs(ranks, microbatches, chunks), Costs(1, 2)).peaks == (microbatches * chunks,) * ranks
    expected = tuple(min(microbatches, 2 * (ranks - rank) - 1) for rank in range(ranks))
    assert simulate(eager_one_f_one_b(ranks, microbatches), Costs(1, 2)).peaks == expected


@given(ranks_, microbatches_, st.integers(2, 4))
def test_peak_activations_of_interleaved_are_megatron_s(ranks: int, microbatches: int, chunks: int) -> None:
    group = max(group_sizes(ranks, microbatches))
    assert group == ranks or microbatches % ranks
    expected = tuple(
        min(chunks * microbatches, (chunks - 1) * group + 2 * (ranks - 1 - rank) + 1) for rank in range(ranks)
    )
    assert simulate(interleaved(ranks, microbatches, chunks), Costs(1, 2)).peaks == expected


@given(ranks_, microbatches_)
def test_with_one_chunk_interleaved_is_1f1b_and_looped_bfs_is_gpipe(ranks: int, microbatches: int) -> None:
    assert interleaved(ranks, microbatches, 1).rows == one_f_one_b(ranks, microbatches).rows
    assert looped_bfs(ranks, microbatches, 1).rows == gpipe(ranks, microbatches).rows


@given(ranks_, st.integers(1, 500))
def test_groups_are_nearly_equal_and_as_many_as_there_can_be(ranks: int, microbatches: int) -> None:
    sizes = group_sizes(ranks, microbatches)
    assert sum(sizes) == microbatches
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == max(1, microbatches // ranks)


# ---- by name ----


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generated_schedule_has_the_name_it_was_asked_by(name: str) -> None:
    assert generate(name, 4, 8).name == name


def test_a_misspelt_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(LayoutError, match="no schedule is called '1F1B'; did you mean '1f1b'\\? there are gpipe, 1f1b"):
        generate("1F1B", 4, 8)
    with pytest.raises(LayoutError, match="no schedule is called 'qqq'; there are"):
        generate("qqq", 4, 8)


@pytest.mark.parametrize(("name", "own"), [("gpipe", "one stage"), ("zb-h1", "one stage"), ("v-min", "2 stages")])
def test_a_fixed_number_of_stages_a_rank_means_so_many_chunks(name: str, own: str) -> None:
    with pytest.raises(LayoutError, match=rf"{name} puts {own} on a rank, not chunks = 3; use chunks = .*or one of:"):
        generate(name, 4, 8, chunks=3)


def test_the_two_stages_a_rank_of_a_v_need_not_be_asked_for() -> None:
    assert generate("zb-v", 4, 8) == generate("zb-v", 4, 8, chunks=2)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "4"])
@pytest.mark.parametrize("argument", ["ranks", "microbatches", "chunks"])
def test_numbers_below_one_are_refused_by_name(argument: str, wrong: object) -> None:
    numbers = {"ranks": 4, "microbatches": 8, "chunks": 2} | {argument: wrong}
    with pytest.raises(LayoutError, match=f"{argument} = {wrong!r} must be an integer >= 1"):
        generate("interleaved", **numbers)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 8)])
def test_a_million_actions_are_generated(name: str, chunks: int) -> None:
    schedule = generate(name, 64, 8192 // chunks, chunks)
    assert schedule.num_actions == 1 << 20
    assert np.unique(schedule.rows[5].codes).size == len(schedule.rows[5])
    assert schedule.rows[5][0] == Action(5, Kind.F, 0)
