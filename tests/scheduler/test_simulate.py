"""The simulator: closed forms, and agreement with a naive simulator on every schedule, transport and cost."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipert.scheduler import compiled
from pipert.scheduler.action import COUNTERPART, Action, Kind
from pipert.scheduler.costs import Costs
from pipert.scheduler.errors import CostError, DeadlockError, UnsafeProgramError
from pipert.scheduler.generators.gpipe import gpipe
from pipert.scheduler.generators.interleaved import interleaved
from pipert.scheduler.generators.one_f_one_b import one_f_one_b
from pipert.scheduler.lower import lower
from pipert.scheduler.program import Program
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.semantics import MPI, MPI_BUFFERED, MPI_SYNCHRONOUS, Semantics
from pipert.scheduler.simulate import simulate
from pipert.scheduler.timeline import Timeline
from tests.scheduler.hand_written import crossing, program, schedule
from tests.scheduler.layouts import any_semantics, lowering_options, schedules
from tests.scheduler.naive_times import Times, program_times, schedule_times

PUBLISHED = Path(__file__).resolve().parents[3] / "shared" / "data" / "zero_bubble_table.csv"


def rows(timeline: Timeline) -> list[list[tuple[str, float, float]]]:
    by_rank: list[list[tuple[str, float, float]]] = [[] for _ in range(timeline.num_ranks)]
    for rank, action, start, end in timeline:
        by_rank[rank].append((str(action), start, end))
    return by_rank


def times(timeline: Timeline) -> Times:
    return {
        (rank, at): (start, end) for rank, row in enumerate(rows(timeline)) for at, (_, start, end) in enumerate(row)
    }


# ---- cases 10 and 11 ----


def test_gpipe_and_1f1b_idle_three_elevenths_with_four_ranks_and_eight_microbatches() -> None:
    for made in (gpipe(4, 8), one_f_one_b(4, 8)):
        timeline = simulate(made, Costs(1, 2))
        assert timeline.makespan == 33
        assert timeline.bubble == pytest.approx(3 / 11, abs=1e-15)
        assert timeline.idle == (9, 9, 9, 9)


def test_interleaving_with_two_chunks_idles_three_nineteenths() -> None:
    timeline = simulate(interleaved(4, 8, 2), Costs(0.5, 1))
    assert timeline.bubble == pytest.approx(3 / 19, abs=1e-15)


@pytest.mark.parametrize("microbatches", [8, 32])
def test_1f1b_keeps_as_many_microbatches_as_ranks_follow(microbatches: int) -> None:
    assert simulate(one_f_one_b(4, microbatches), Costs(1, 2)).peaks == (4, 3, 2, 1)


def test_gpipe_keeps_all_microbatches() -> None:
    assert simulate(gpipe(4, 8), Costs(1, 2)).peaks == (8, 8, 8, 8)


@given(st.integers(1, 8), st.integers(1, 12), st.integers(1, 9), st.integers(1, 9))
def test_the_bubble_of_gpipe_and_1f1b_is_the_closed_form(ranks: int, batches: int, forward: int, backward: int) -> None:
    for made in (gpipe(ranks, batches), one_f_one_b(ranks, batches)):
        timeline = simulate(made, Costs(forward, backward))
        assert timeline.makespan == (batches + ranks - 1) * (forward + backward)
        assert timeline.bubble == pytest.approx((ranks - 1) / (batches + ranks - 1))


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published measurements are not here")
def test_1f1b_with_communication_reproduces_the_published_bubbles() -> None:
    """Qi et al. 2024 (arXiv 2401.10241): bubble rates of 1F1B from profiled times and one hop of communication."""
    for row in csv.DictReader(PUBLISHED.open()):
        forward, inputs, weights, hop = (float(row[f"t_{name}_ms"]) for name in ("f", "b", "w", "comm"))
        made = one_f_one_b(int(row["stages"]), int(row["microbatches"]))
        timeline = simulate(made, Costs(forward, inputs + weights, comm=hop))
        work = made.microbatches * (forward + inputs + weights)
        assert 1 - work / timeline.makespan == pytest.approx(float(row["bubble_1f1b"]), abs=1e-4)


# ---- small examples, by hand ----


def test_every_time_of_a_small_schedule() -> None:
    timeline = simulate(one_f_one_b(2, 2), Costs((1, 2), (3, 4), comm=0.5))
    assert rows(timeline) == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 8, 11), ("0B1", 14, 17)],
        [("1F0", 1.5, 3.5), ("1B0", 3.5, 7.5), ("1F1", 7.5, 9.5), ("1B1", 9.5, 13.5)],
    ]


def test_blocking_sends_hold_the_rank_that_sends() -> None:
    timeline = simulate(one_f_one_b(2, 2), Costs(1, 1, comm=0.5), blocking=True)
    assert rows(timeline) == [
        [("0F0", 0, 1), ("0F1", 1.5, 2.5), ("0B0", 4, 5), ("0B1", 6.5, 7.5)],
        [("1F0", 1.5, 2.5), ("1B0", 2.5, 3.5), ("1F1", 4, 5), ("1B1", 5, 6)],
    ]


def test_hand_overs_on_one_rank_take_no_time() -> None:
    made = schedule("0 1 1 0", 1, "0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")
    assert simulate(made, Costs(1, 1, comm=10)).makespan == 4 * 10 + 8


def test_a_message_and_a_computation_overlap() -> None:
    made = program("0 1", 2, "0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1RECV_F1 1F0 1F1", trainable_from=2)
    assert rows(simulate(made, Costs(2, 0, comm=1))) == [
        [("0F0", 0, 2), ("0SEND_F0", 2, 3), ("0F1", 2, 4), ("0SEND_F1", 4, 5)],
        [("1RECV_F0", 0, 3), ("1RECV_F1", 0, 5), ("1F0", 3, 5), ("1F1", 5, 7)],
    ]


def test_a_rendezvous_waits_for_the_receiver_and_a_buffered_message_does_not() -> None:
    made = program("0 1", 2, "0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1F0 1RECV_F1 1F1", trainable_from=2)
    costs = Costs((1, 5), 0, comm=1)
    assert rows(simulate(made, costs))[1] == [
        ("1RECV_F0", 0, 2),
        ("1F0", 2, 7),
        ("1RECV_F1", 7, 8),
        ("1F1", 8, 13),
    ]
    assert simulate(replace(made, semantics=replace(MPI, buffered=True)), costs).makespan == 12


def test_messages_of_a_group_end_together() -> None:
    rows_of = ("0F0 0F1 0SEND_F0 0SEND_F1", "1RECV_F0 1F0 1RECV_F1 1F1")
    made = program("0 1", 2, *rows_of, semantics=replace(MPI, grouped=True), groups=(((2, 4),), ()), trainable_from=2)
    timeline = rows(simulate(made, Costs(1, 0, comm=1)))
    assert timeline[0][2:] == [("0SEND_F0", 2, 5), ("0SEND_F1", 2, 5)]
    assert timeline[1] == [("1RECV_F0", 0, 3), ("1F0", 3, 4), ("1RECV_F1", 4, 5), ("1F1", 5, 6)]
    assert rows(simulate(replace(made, groups=()), Costs(1, 0, comm=1)))[0][2] == ("0SEND_F0", 2, 3)


def test_reductions_and_ties_take_time_and_overlap_computations() -> None:
    made = program(
        "0 1 0 1",
        1,
        "0F0 0SEND_F0 2RECV_F0 2F0 2SEND_F0 2RECV_B0 2B0 2SEND_B0 2REDUCE 0RECV_B0 0B0 0TIE0 0REDUCE",
        "1RECV_F0 1F0 1SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 1RECV_B0 1B0 1SEND_B0 1REDUCE 3TIE0 3REDUCE",
        ties=((0, 3),),
    )
    timeline = simulate(made, Costs(1, 1, reduce=3, tie=0.5))
    found = {str(action): (start, end) for _, action, start, end in timeline}
    assert found["2REDUCE"] == (6, 9)  # while 0B0 runs
    assert found["0B0"] == (7, 8)
    assert (found["0TIE0"], found["3TIE0"]) == ((8, 8.5), (7, 8.5))
    assert found["0REDUCE"] == (8.5, 11.5)
    assert timeline.makespan == 11.5


# ---- against the naive simulator ----

durations = st.integers(0, 20).map(lambda quarters: quarters / 4)


@st.composite
def costs_for(draw: st.DrawFn, stages: int) -> Costs:
    each = st.lists(durations, min_size=stages, max_size=stages)
    names = ["forward", "backward", "input_gradient", "weight_gradient", "comm", "meta", "reduce", "tie"]
    names += ["scatter", "gather", "norm", "step", "offload", "reload"]
    return Costs(**{name: draw(each | durations) for name in names})


def by_kind(costs: Costs, stages: int) -> dict[tuple[Kind, int], float]:
    """Every duration, from the costs' own fields."""

    def at(value: object, stage: int) -> float:
        return value[stage] if isinstance(value, tuple) else value  # type: ignore[return-value]

    result = {}
    for stage in range(stages):
        fields = {Kind.F: costs.forward, Kind.B: costs.backward, Kind.I: costs.input_gradient}
        fields |= {Kind.W: costs.weight_gradient, Kind.REDUCE: costs.reduce, Kind.TIE: costs.tie, Kind.FREE: 0.0}
        fields |= {Kind.SCATTER: costs.scatter, Kind.GATHER: costs.gather, Kind.NORM: costs.norm, Kind.STEP: costs.step}
        fields |= {Kind.OFFLOAD: costs.offload, Kind.RELOAD: costs.reload}
        for kind, value in fields.items():
            result[kind, stage] = at(value, stage)
        for kind, (_, offset) in COUNTERPART.items():
            other = stage + offset
            if 0 <= other < stages:
                result[kind, stage] = at(costs.meta if "META" in kind.name else costs.comm, min(stage, other))
    return result


@given(schedules(ranks=5, chunks=3, microbatches=8), st.booleans(), st.data())
def test_schedules_run_as_in_the_naive_simulator(made: Schedule, blocking: bool, data: st.DataObject) -> None:
    costs = data.draw(costs_for(made.num_stages))
    kinds = by_kind(costs, made.num_stages)
    comm = [kinds.get((Kind.SEND_F, stage), 0.0) for stage in range(made.num_stages)]
    assert times(simulate(made, costs, blocking=blocking)) == schedule_times(made, kinds, comm, blocking)


@given(schedules(ranks=4, chunks=2, microbatches=6), any_semantics, st.data())
@settings(max_examples=200)
def test_programs_run_as_in_the_naive_simulator(made: Schedule, semantics: Semantics, data: st.DataObject) -> None:
    lowered = lower(made, semantics, **data.draw(lowering_options(made)))
    costs = data.draw(costs_for(made.num_stages))
    assert times(simulate(lowered, costs)) == program_times(lowered, by_kind(costs, made.num_stages))


@given(schedules(ranks=5, chunks=3, microbatches=8), st.data())
def test_compiled_and_plain_kernels_agree(made: Schedule, data: st.DataObject) -> None:
    costs = data.draw(costs_for(made.num_stages))
    lowered = lower(made, data.draw(any_semantics))
    plain = [simulate(made, costs), simulate(made, costs, blocking=True), simulate(lowered, costs)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "WORTH_COMPILING", 0)
        fast = [simulate(made, costs), simulate(made, costs, blocking=True), simulate(lowered, costs)]
    assert fast == plain


@given(schedules(ranks=6, microbatches=12), st.data())
def test_buffered_messages_without_queues_cost_what_the_schedule_predicts(made: Schedule, data: st.DataObject) -> None:
    costs = data.draw(costs_for(made.num_stages))
    lowered = lower(made, replace(MPI, buffered=True), prefetch=0)
    assert simulate(lowered, costs).computation() == simulate(made, costs)


@given(schedules(ranks=4, microbatches=8), st.data())
def test_a_longer_action_never_ends_the_step_earlier(made: Schedule, data: st.DataObject) -> None:
    costs = data.draw(costs_for(made.num_stages))
    name = data.draw(st.sampled_from(["forward", "backward", "input_gradient", "weight_gradient", "comm"]))
    longer = replace(costs, **{name: tuple(np.add(getattr(costs, name), 1.0) * np.ones(made.num_stages))})
    assert simulate(made, longer).makespan >= simulate(made, costs).makespan


# ---- refusals ----


def test_a_cyclic_wait_is_refused_with_the_actions_that_wait() -> None:
    made = schedule("0 1", 2, "0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1")
    with pytest.raises(
        DeadlockError, match="rank 0 waits in 0B0 for 1B0 of rank 1, which waits in 1F1 for 0F1 of rank 0"
    ):
        simulate(made, Costs(1, 1))


def test_a_missing_action_is_refused_with_its_name() -> None:
    made = schedule("0 1", 1, "0F0 0B0", "1F0")
    with pytest.raises(DeadlockError, match="rank 0 waits in 0B0 for 1B0, which nobody runs"):
        simulate(made, Costs(1, 1))
    with pytest.raises(DeadlockError, match="rank 0 waits in 0B0 for 0F0, which comes later in its own row"):
        simulate(schedule("0", 1, "0B0 0F0"), Costs(1, 1))


def test_a_program_that_deadlocks_is_refused_with_the_picture() -> None:
    with pytest.raises(DeadlockError, match="rank 0 waits in SEND 0F1 to rank 1, which waits in SEND 1F0 to rank 0"):
        simulate(crossing(MPI_SYNCHRONOUS), Costs(1, 1))
    simulate(crossing(MPI_BUFFERED), Costs(1, 1))


@pytest.mark.parametrize(
    ("microbatches", "rows", "message"),
    [
        (1, ("0F0 0F0 0B0", "1F0 1B0"), "a second 0F0"),
        (1, ("0F0 0B0 0B0", "1F0 1B0"), "a second 0B0"),
        (1, ("0F0 0B0 0W0", "1F0 1B0"), "back-propagated twice"),
        (1, ("0F0 0B0",), "1 rows for a placement on 2 ranks"),
        (1, ("0F0 0B0", "1F0 1B0", ""), "3 rows for a placement on 2 ranks"),
        (0, ("", ""), "0 micro-batches"),
        (10**18, ("0F0 0B0", "1F0 1B0"), "4 actions cannot run"),
    ],
)
def test_a_schedule_that_does_something_twice_or_has_no_size_is_refused(
    microbatches: int, rows: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UnsafeProgramError, match=message):
        simulate(schedule("0 1", microbatches, *rows), Costs(1, 2))


def test_malformed_targets_are_refused_before_they_run() -> None:
    with pytest.raises(UnsafeProgramError, match="micro-batch 7 of 1"):
        simulate(schedule("0", 1, "0F7 0B0"), Costs(1, 1))
    with pytest.raises(UnsafeProgramError, match="stage 1 is on rank 1, so it cannot be on rank 0 too"):
        simulate(schedule("0 1", 1, "0F0 1F0 0B0", "1F0 1B0"), Costs(1, 1))
    with pytest.raises(UnsafeProgramError, match="there is no 1RECV_F0"):
        simulate(program("0 1", 1, "0F0 0SEND_F0", "1F0", trainable_from=2), Costs(1, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forward": -1}, "forward = -1 must be finite and not negative"),
        ({"forward": float("nan")}, "must be finite"),
        ({"forward": (1, float("inf"))}, "must be finite"),
        ({"forward": (1, 2, 3)}, "forward has 3 numbers for 2 stages; give one, or one for each stage"),
        ({"forward": "fast"}, "forward = 'fast' must be a duration"),
        ({"forward": None}, "forward = None must be a duration"),
        ({"backward": 2j}, "backward = 2j must be a duration"),
        ({"weight_gradient": 3}, "half of the backward takes longer than all of it, 2.0 on stage 0"),
    ],
)
def test_costs_that_are_no_durations_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(CostError, match=message):
        simulate(one_f_one_b(2, 2), Costs(**({"forward": 1, "backward": 2} | options)))  # type: ignore[arg-type]


def test_halves_of_the_backward_default_to_what_the_other_leaves() -> None:
    table = Costs(1, 3).table(1)
    assert (table[Kind.I, 0], table[Kind.W, 0]) == (1.5, 1.5)
    assert Costs(1, 3, input_gradient=2).table(1)[Kind.W, 0] == 1
    assert Costs(1, 3, weight_gradient=2).table(1)[Kind.I, 0] == 1
    both = Costs(1, 3, input_gradient=2, weight_gradient=2).table(1)
    assert (both[Kind.I, 0], both[Kind.W, 0]) == (2, 2)
    assert Costs((1, 2), 3).stages == 2
    assert Costs(1, 3).stages is None


def test_costs_are_values() -> None:
    assert Costs([1, 2], 3) == Costs((1.0, 2.0), 3.0)
    assert len({Costs([1, 2], 3), Costs((1.0, 2.0), 3.0)}) == 1
    assert Costs(np.array([1, 2]), 3).forward == (1.0, 2.0)  # type: ignore[arg-type]


def test_actions_of_a_program_keep_their_order() -> None:
    lowered: Program = lower(one_f_one_b(3, 4), MPI)
    timeline = simulate(lowered, Costs(1, 2, comm=0.1))
    assert [action for rank, action, *_ in timeline if rank == 1] == list(lowered.rows[1])
    assert Action.parse("1SEND_F0") in lowered.rows[1]
