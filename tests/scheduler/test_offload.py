"""Activations in host memory: drawn by hand, by property, and as what the verifier refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipert.scheduler.action import Action, Kind
from pipert.scheduler.costs import Costs
from pipert.scheduler.errors import LayoutError
from pipert.scheduler.formats.text import dumps, loads
from pipert.scheduler.generators.gpipe import gpipe
from pipert.scheduler.generators.one_f_one_b import one_f_one_b
from pipert.scheduler.generators.registry import generate
from pipert.scheduler.lower import lower
from pipert.scheduler.placement import Placement
from pipert.scheduler.program import Program
from pipert.scheduler.row import ActionRow
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.semantics import MPI, NCCL_GROUPED, Semantics
from pipert.scheduler.simulate import simulate
from pipert.scheduler.verify import verify
from tests.scheduler.layouts import any_semantics, schedules

MOVES = (Kind.OFFLOAD, Kind.RELOAD)


def without_messages(program: Program, rank: int) -> str:
    return " ".join(str(action) for action in program.rows[rank] if not action.kind.is_message)


def test_1f1b_keeps_the_next_and_moves_the_others() -> None:
    program = lower(one_f_one_b(4, 6), MPI, offload={0: 1})
    assert without_messages(program, 0) == (
        "0F0 0F1 0OFFLOAD1 0F2 0OFFLOAD2 0F3 0OFFLOAD3 0B0 0RELOAD1 0F4 0OFFLOAD4 0B1 0RELOAD2 0F5 0OFFLOAD5 "
        "0B2 0RELOAD3 0B3 0RELOAD4 0B4 0RELOAD5 0B5"
    )
    assert not any(action.kind in MOVES for row in program.rows[1:] for action in row)
    assert verify(program, limits=[2, 3, 2, 1]).ok
    assert not verify(program, limits=[1, 3, 2, 1]).ok


def test_backwards_in_reverse_move_the_oldest() -> None:
    order = "0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0"
    schedule = Schedule.of("reversed", Placement((0,)), 4, [ActionRow.parse(order)])
    assert without_messages(lower(schedule, MPI, offload={0: 2}), 0) == (
        "0F0 0F1 0F2 0OFFLOAD0 0F3 0OFFLOAD1 0B3 0RELOAD1 0B2 0RELOAD0 0B1 0B0"
    )


def test_a_program_says_it_as_text_and_in_its_proof() -> None:
    program = lower(gpipe(2, 4), MPI, offload={0: 1, 1: 1})
    assert loads(dumps(program)) == program
    assert "6 micro-batches of activations go to host memory" in str(verify(program))
    assert "offload" not in dumps(lower(gpipe(2, 4), MPI)).lower()


@given(schedules(ranks=4, chunks=3, microbatches=10), any_semantics, st.data())
@settings(max_examples=150)
def test_every_schedule_stays_safe_and_keeps_as_many_as_it_may(
    schedule: Schedule, rules: Semantics, data: st.DataObject
) -> None:
    stages = schedule.num_stages
    keep = data.draw(st.dictionaries(st.sampled_from(range(stages)), st.integers(1, 3)))
    plain, program = lower(schedule, rules), lower(schedule, rules, offload=keep)
    assert verify(program).ok
    assert [[a for a in row if a.kind not in MOVES] for row in program.rows] == [list(row) for row in plain.rows]
    assert [sum(stop - start for start, stop in program.spans(rank)) for rank in range(program.num_ranks)] == [
        sum(stop - start for start, stop in plain.spans(rank)) for rank in range(program.num_ranks)
    ]
    for row in program.rows:
        for stage, most in keep.items():
            changes = {Kind.F: 1, Kind.B: -1, Kind.W: -1, Kind.OFFLOAD: -1, Kind.RELOAD: 1}
            live = peak = 0
            for action in row:
                live += changes.get(action.kind, 0) if action.stage == stage else 0
                peak = max(peak, live)
            split = any(action.kind is Kind.W for action in row)
            if schedule.name in ("gpipe", "1f1b") and not split:
                assert peak <= most + 1


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_peak_does_not_grow_with_micro_batches(name: str) -> None:
    for microbatches in (8, 32):
        program = lower(generate(name, 4, microbatches, 1), MPI, offload=dict.fromkeys(range(4), 2))
        assert max(simulate(program, Costs(1, 2)).peaks) <= 3


def test_copies_overlap_with_computing_where_there_is_time() -> None:
    schedule = one_f_one_b(4, 16)
    plain = simulate(lower(schedule, MPI), Costs(1, 2))
    moved = lower(schedule, MPI, offload=dict.fromkeys(range(4), 2))
    assert simulate(moved, Costs(1, 2, offload=1.0, reload=1.0)).makespan == plain.makespan
    slow = simulate(moved, Costs(1, 2, offload=8.0, reload=8.0))
    assert slow.makespan > 2 * plain.makespan


def test_copies_of_one_direction_follow_one_another() -> None:
    program = lower(gpipe(1, 3), MPI, offload={0: 1})
    timeline = simulate(program, Costs(1, 1, offload=5.0, reload=2.0))
    times = {str(action): (start, end) for _, action, start, end in timeline}
    assert times["0OFFLOAD1"] == (2.0, 7.0)
    assert times["0OFFLOAD2"] == (7.0, 12.0)
    assert times["0RELOAD1"] == (7.0, 9.0)
    assert times["0B1"] == (9.0, 10.0)
    assert times["0RELOAD2"] == (12.0, 14.0)


def changed(text: str) -> Program:
    program = lower(gpipe(1, 2), MPI)
    return replace(program, rows=(ActionRow.parse(text),))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("0F0 0OFFLOAD0 0F1 0B0 0RELOAD0 0B1", r"0B0.*stands before 0RELOAD0"),
        ("0F0 0OFFLOAD0 0F1 0B0 0B1", r"moved by 0OFFLOAD0 and never by 0RELOAD0"),
        ("0F0 0F1 0RELOAD0 0B0 0B1", r"moved by 0RELOAD0 and never by 0OFFLOAD0"),
        ("0OFFLOAD0 0F0 0F1 0RELOAD0 0B0 0B1", r"0OFFLOAD0.*stands before 0F0"),
        ("0F0 0RELOAD0 0OFFLOAD0 0F1 0B0 0B1", r"0RELOAD0.*stands before 0OFFLOAD0"),
        ("0F0 0OFFLOAD0 0OFFLOAD0 0F1 0RELOAD0 0B0 0B1", r"a second 0OFFLOAD0"),
    ],
)
def test_a_backward_that_finds_no_activations_is_refused(row: str, words: str) -> None:
    proof = verify(changed(row))
    assert not proof.ok
    assert "let forward, OFFLOAD, RELOAD and backward" in str(proof) or "uniqueness" in str(proof)
    with pytest.raises(Exception, match=f"(?s){words}"):
        proof.require()


def test_a_stage_without_a_backward_moves_nothing() -> None:
    program = lower(gpipe(2, 3), MPI, trainable_from=1, offload={0: 1, 1: 1})
    assert not any(action.kind in MOVES for action in program.rows[0])
    evaluation = lower(gpipe(2, 3), MPI, trainable_from=2, offload={0: 1})
    assert not any(action.kind in MOVES for row in evaluation.rows for action in row)
    rows = (ActionRow([*list(program.rows[0]), Action(0, Kind.OFFLOAD, 0), Action(0, Kind.RELOAD, 0)]), program.rows[1])
    assert "has no backward" in str(verify(replace(program, rows=rows)))


def test_messages_that_start_together_still_do() -> None:
    plain, moved = (lower(one_f_one_b(4, 8), NCCL_GROUPED, offload=offload) for offload in ({}, {0: 1, 1: 1}))
    assert list(map(len, plain.groups)) == list(map(len, moved.groups))


@pytest.mark.parametrize("keep", [{0: 0}, {9: 1}, {0: True}, {0: 1.5}, {-1: 1}])
def test_impossible_numbers_are_refused(keep: dict[int, int]) -> None:
    with pytest.raises(LayoutError, match="1 or more"):
        lower(gpipe(2, 2), MPI, offload=keep)
