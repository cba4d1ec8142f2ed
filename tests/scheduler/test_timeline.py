"""Timelines: their figures, their text, comparing them, and the trace that Perfetto opens."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipert.scheduler.action import Action, Kind
from pipert.scheduler.compare import compare
from pipert.scheduler.costs import Costs
from pipert.scheduler.errors import TimelineError
from pipert.scheduler.generators.gpipe import gpipe
from pipert.scheduler.generators.one_f_one_b import one_f_one_b
from pipert.scheduler.lower import lower
from pipert.scheduler.row import ActionRow
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.semantics import MPI
from pipert.scheduler.simulate import simulate
from pipert.scheduler.timeline import Timeline
from pipert.scheduler.trace import chrome_trace
from tests.scheduler.hand_written import schedule
from tests.scheduler.layouts import lowering_options, schedules

costs = Costs(1.1, 2.3, input_gradient=1.2, weight_gradient=1.1, comm=0.01, reduce=0.5, tie=0.1)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    made = draw(schedules(ranks=4, microbatches=6))
    if draw(st.booleans()):
        return simulate(made, costs)
    return simulate(lower(made, MPI, **draw(lowering_options(made))), costs)


def measured(*lanes: str, took: float = 1.0, start: float = 0.0) -> Timeline:
    """A run in which every action of a rank follows the one before."""
    rows = [ActionRow.parse(lane).codes for lane in lanes]
    times = [start + took * np.arange(len(row)) for row in rows]
    return Timeline.of("measured", [(row, at, at + took) for row, at in zip(rows, times, strict=True)])


# ---- figures ----


def test_busy_idle_and_bubble_count_computations_only() -> None:
    timeline = measured("0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE", "1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE", start=100)
    assert timeline.makespan == 5
    assert timeline.busy == (2, 2)
    assert timeline.idle == (3, 3)
    assert timeline.bubble == 0.6
    assert (timeline.start, timeline.end) == (100, 105)
    assert timeline.from_zero().start == 0
    assert timeline.from_zero().makespan == 5
    assert [str(action) for _, action, *_ in timeline.computation()] == ["0F0", "0B0", "1F0", "1B0"]


def test_a_rank_that_does_nothing_is_idle_all_the_time() -> None:
    timeline = measured("0F0 0B0", "")
    assert timeline.idle == (0, 2)
    assert timeline.peaks == (1, 0)
    nothing = measured("", "")
    assert (nothing.makespan, nothing.bubble, nothing.peaks) == (0, 0, (0, 0))


def test_activations_live_from_the_start_of_a_forward_to_the_end_of_its_backward() -> None:
    at, count = simulate(one_f_one_b(2, 3), Costs(1, 2)).live(0)
    assert at.tolist() == [0, 1, 6, 6, 9, 12]
    assert count.tolist() == [1, 2, 1, 2, 1, 0]


def test_a_split_backward_keeps_activations_until_its_weight_half() -> None:
    at, count = simulate(schedule("0", 2, "0F0 0I0 0F1 0I1 0W0 0W1"), Costs(1, 2)).live(0)
    assert list(zip(at.tolist(), count.tolist(), strict=True)) == [(0, 1), (2, 2), (5, 1), (6, 0)]


def test_stages_without_a_backward_keep_nothing() -> None:
    for trainable_from, peaks in ((3, (0, 0, 0)), (1, (0, 2, 1)), (0, (3, 2, 1))):
        lowered = lower(one_f_one_b(3, 4), MPI, trainable_from=trainable_from)
        assert simulate(lowered, Costs(1, 2)).peaks == peaks


@given(schedules(ranks=5, microbatches=10))
def test_all_activations_are_freed_at_the_end(made: Schedule) -> None:
    timeline = simulate(made, costs)
    for rank in range(timeline.num_ranks):
        assert timeline.live(rank)[1][-1] == 0
        assert timeline.live(rank)[1].max() == timeline.peaks[rank]


# ---- a value ----


@given(timelines())
def test_json_round_trips_without_loss(timeline: Timeline) -> None:
    again = Timeline.from_json(timeline.to_json())
    assert again == timeline
    assert hash(again) == hash(timeline)
    assert again.named("another") != timeline
    assert list(again) == list(timeline)


def test_timelines_cannot_be_changed() -> None:
    timeline = measured("0F0 0B0")
    with pytest.raises(ValueError, match="read-only"):
        timeline.starts[0] = 7.0


def test_the_recorder_keeps_its_own_arrays() -> None:
    starts = np.zeros(1)
    timeline = Timeline.of("kept", [(ActionRow.parse("0F0").codes, starts, starts + 1)])
    starts[0] = 0.5
    assert timeline.starts[0] == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a timeline"),
        ("[]", "not a timeline"),
        ("{}", "not a timeline"),
        ('{"format": "pipert-timeline", "version": 2}', "version 2 is not 'pipert-timeline' version 1"),
        ('{"format": "x", "version": 1}', "'x' version 1 is not"),
        (
            '{"format": "pipert-timeline", "version": 1, "name": "a", "ranks": [{"actions": "0X0", "starts": [0], '
            '"ends": [1]}]}',
            "unknown kind",
        ),
        (
            '{"format": "pipert-timeline", "version": 1, "name": "a", "ranks": [{"actions": "0F0", "starts": [], '
            '"ends": [1]}]}',
            "1 actions, 0 starts, 1 ends",
        ),
        ('{"format": "pipert-timeline", "version": 1, "name": "a", "ranks": []}', "at least one rank"),
    ],
)
def test_texts_that_are_no_timeline_are_refused(text: str, message: str) -> None:
    with pytest.raises(TimelineError, match=message):
        Timeline.from_json(text)


def test_times_that_cannot_be_are_refused() -> None:
    code = ActionRow.parse("2F3").codes
    with pytest.raises(TimelineError, match=r"2F3 lasts from 2\.0 to 1\.0; an action must not end before it starts"):
        Timeline.of("backwards", [(code, [2.0], [1.0])])
    with pytest.raises(TimelineError, match="2F3 lasts from nan"):
        Timeline.of("not a number", [(code, [float("nan")], [1.0])])


def test_a_timeline_prints_its_figures() -> None:
    assert str(simulate(one_f_one_b(4, 8), Costs(1, 2))) == (
        "1f1b: 4 ranks, 64 actions, makespan 33, bubble 27.27%, peak live micro-batches 4, 3, 2, 1"
    )


# ---- comparing ----


def test_comparing_gives_the_differences_of_every_action() -> None:
    predicted = simulate(one_f_one_b(2, 2), Costs(1, 2))
    slower = simulate(lower(one_f_one_b(2, 2), MPI), Costs((1, 1.5), 2, comm=0.25))
    comparison = compare(predicted, slower)
    assert comparison.ratio == slower.makespan / predicted.makespan
    assert len(comparison.codes) == len(predicted)
    at = comparison.codes.tolist().index(Action(1, Kind.F, 1).code)
    assert comparison.ranks[at] == 1
    assert comparison.duration_differences[at] == 0.5
    assert comparison.start_differences[at] == 0.75
    assert comparison.latest(1) == [(0, Action(0, Kind.B, 1), 1.5)]
    assert str(comparison).startswith("1f1b against 1f1b: makespan 10.5 against 9, ratio 1.1667\n  F ")


@given(timelines(), st.floats(-1e3, 1e3))
def test_a_shifted_run_is_no_different(timeline: Timeline, by: float) -> None:
    shifted = Timeline("later", timeline.offsets, timeline.codes, timeline.starts + by, timeline.ends + by)
    comparison = compare(timeline, shifted)
    assert np.abs(comparison.start_differences).max() < 1e-9
    assert comparison.ratio == pytest.approx(1)


def test_runs_of_other_layouts_cannot_be_compared() -> None:
    with pytest.raises(TimelineError, match="2 ranks and 1f1b 3"):
        compare(simulate(gpipe(2, 2), costs), simulate(one_f_one_b(3, 2), costs))
    with pytest.raises(TimelineError, match="no action in common"):
        compare(measured("0F0"), measured("0F1"))
    with pytest.raises(TimelineError, match="an action twice on rank 0; compare single steps"):
        compare(measured("0F0"), measured("0F0 0F0"))


# ---- traces ----


@given(timelines())
def test_a_trace_has_a_range_for_every_action_named_as_it_is(timeline: Timeline) -> None:
    events = json.loads(chrome_trace(timeline, timeline.named("again")))["traceEvents"]
    for process in (0, 1):
        own = [event for event in events if event["pid"] == process and event["ph"] in "Xb"]
        assert [(event["tid"], event["name"]) for event in own] == [
            (rank, str(action)) for rank, action, *_ in timeline
        ]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: timeline.name, 1: "again"}


@given(timelines())
def test_the_ranges_of_a_thread_never_overlap(timeline: Timeline) -> None:
    """Overlapping ranges of one thread are not drawn side by side but nested: that would be a wrong picture."""
    events = json.loads(chrome_trace(timeline))["traceEvents"]
    for rank in range(timeline.num_ranks):
        own = [event for event in events if event["ph"] == "X" and event["tid"] == rank]
        assert all(one["ts"] + one["dur"] <= after["ts"] + 1e-3 for one, after in pairwise(own))
    begun = [event["id"] for event in events if event["ph"] == "b"]
    assert sorted(begun) == sorted(event["id"] for event in events if event["ph"] == "e")
    assert len(set(begun)) == len(begun)
