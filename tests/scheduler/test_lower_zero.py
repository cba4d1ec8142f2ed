"""Lowering for ZeRO: gradients to shards, weights gathered and freed, updates; drawn by hand and by property."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipert.scheduler.action import Action, Kind
from pipert.scheduler.costs import Costs
from pipert.scheduler.errors import LayoutError, UnsafeProgramError
from pipert.scheduler.formats.text import dumps, loads
from pipert.scheduler.generators.interleaved import interleaved
from pipert.scheduler.generators.one_f_one_b import one_f_one_b
from pipert.scheduler.lower import lower
from pipert.scheduler.lower.updates import update_program
from pipert.scheduler.placement import Placement
from pipert.scheduler.program import Program
from pipert.scheduler.row import ActionRow
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.semantics import MPI, NCCL_GROUPED, Semantics
from pipert.scheduler.simulate import simulate
from pipert.scheduler.verify import verify
from tests.scheduler.layouts import any_semantics, schedules

ACROSS_REPLICAS = (Kind.REDUCE, Kind.SCATTER, Kind.GATHER)


def rows(program: Program) -> str:
    return "\n".join(map(str, program.rows))


def sharded(schedule: Schedule, zero: int, semantics: Semantics = MPI, **options: object) -> Program:
    return lower(schedule, semantics, reduce=True, zero=zero, **options)  # type: ignore[arg-type]


def test_from_the_second_stage_on_every_micro_batch_is_summed_at_once() -> None:
    assert rows(sharded(one_f_one_b(2, 2), 2, prefetch=0)) == (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0SCATTER0 0B1 0SCATTER1\n"
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1SCATTER0 1F1 1B1 1SEND_B1 1SCATTER1"
    )


def test_a_rank_with_many_stages_holds_the_weights_of_two() -> None:
    assert rows(sharded(interleaved(1, 1, 3), 3)) == (
        "0GATHER0 1GATHER0 0F0 0FREE0 2GATHER0 1F0 1FREE0 2F0 1GATHER1 2B0 2FREE0 2SCATTER0 "
        "0GATHER1 1B0 1FREE1 1SCATTER0 0B0 0FREE1 0SCATTER0"
    )


def test_a_group_of_messages_stays_one() -> None:
    plain, program = (
        lower(one_f_one_b(4, 4), NCCL_GROUPED, **options) for options in ({}, {"reduce": True, "zero": 3})
    )
    assert list(map(len, program.groups)) == list(map(len, plain.groups))


def test_an_early_step_stands_behind_the_last_sum_of_its_stage() -> None:
    assert rows(sharded(interleaved(1, 1, 2), 1, early=True)) == (
        "0F0 1F0 1B0 1REDUCE 0B0 0REDUCE 1STEP 1GATHER0 0STEP 0GATHER0"
    )
    row = rows(sharded(interleaved(1, 2, 3), 1, early=True))
    assert row.endswith(
        "2B1 2REDUCE 1B1 1REDUCE 2STEP 2GATHER0 0B1 0REDUCE 1STEP 1GATHER0 0STEP 0GATHER0"
    )  # one more computation for each sum to overlap with


def test_a_tied_weight_is_updated_behind_its_last_sum() -> None:
    program = lower(one_f_one_b(2, 1), MPI, reduce=True, early=True, ties=[(0, 1)], prefetch=0)
    assert rows(program) == (
        "0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE 0TIE0 0STEP\n1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE 1TIE0 1STEP"
    )


@pytest.mark.parametrize(
    ("zero", "wanted"),
    [(0, "0NORM 0STEP 2STEP"), (1, "0NORM 0STEP 0GATHER0 2STEP 2GATHER0"), (3, "0NORM 0STEP 2STEP")],
)
def test_an_update_is_a_program_of_its_own(zero: int, wanted: str) -> None:
    program = update_program(Placement((0, 1, 0)), MPI, zero=zero)
    assert str(program.rows[0]) == wanted
    verify(program).require()
    assert simulate(program, Costs(1, 1, norm=2, step=1, gather=4)).makespan == {0: 4, 1: 8, 3: 4}[zero]


@given(schedules(ranks=5, chunks=4, microbatches=9), any_semantics, st.integers(1, 3), st.booleans(), st.data())
def test_programs_of_every_schedule_are_safe_and_are_what_their_text_says(
    schedule: Schedule, semantics: Semantics, zero: int, early: bool, data: st.DataObject
) -> None:
    trainable_from = data.draw(st.integers(0, schedule.num_stages))
    program = sharded(schedule, zero, semantics, early=early, trainable_from=trainable_from)
    verify(program).require()
    assert loads(dumps(program)) == program


@given(schedules(ranks=4, chunks=4, microbatches=9), st.data())
@settings(max_examples=50)
def test_replicas_agree_on_the_order_of_what_they_do_together(schedule: Schedule, data: st.DataObject) -> None:
    """Sizes may travel on one and not on the other; without as many micro-batches the order is that of one."""
    zero, early = data.draw(st.integers(1, 3)), data.draw(st.booleans())
    together = lambda program: [  # noqa: E731
        [action for action in row if action.kind in ACROSS_REPLICAS] for row in program.rows
    ]
    one = sharded(schedule, zero, early=early)
    assert together(sharded(schedule, zero, NCCL_GROUPED, early=early, meta=[0], prefetch=0)) == together(one)
    few = one_f_one_b(schedule.num_ranks, 1), one_f_one_b(schedule.num_ranks, 7)
    least, most = (sharded(each, zero, early=early, alike=False) for each in few)
    assert together(least) == together(most)


@given(schedules(ranks=4, chunks=4, microbatches=6))
@settings(max_examples=50)
def test_at_most_two_stages_of_a_rank_are_whole_and_each_before_it_computes(schedule: Schedule) -> None:
    for row in sharded(schedule, 3).rows:
        whole: set[int] = set()
        for stage, kind, _ in row:
            if kind is Kind.GATHER:
                whole.add(stage)
            elif kind is Kind.FREE:
                whole.remove(stage)
            assert len(whole) <= 2
            assert not kind.is_compute or stage in whole
        assert not whole


def test_gathering_overlaps_with_the_computation_before() -> None:
    costs = Costs(4, 8, gather=4)
    alone = simulate(sharded(interleaved(1, 1, 3), 3), costs).makespan
    assert alone == 3 * 4 + 3 * 8 + 4  # only the first one is waited for


# ---- faults, with their pictures ----


def changed(program: Program, old: str, new: str) -> Program:
    before = str(program.rows[0])
    assert old in before
    return replace(program, rows=(ActionRow.parse(before.replace(old, new)), *program.rows[1:]))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (" 2GATHER0 ", " ", "the weights of stage 2 are gathered fewer times than they are freed"),
        ("2GATHER0 1F0 1FREE0 2F0", "1F0 1FREE0 2F0 2GATHER0", "freed from the beginning, and not gathered again"),
        ("1F0 1FREE0 2F0", "1FREE0 1F0 2F0", "freed since 1FREE0 \\(rank 0, action 5\\), and not gathered again"),
        ("1FREE0 2F0", "1FREE0 1FREE0 2F0", "a second 1FREE0"),
        ("2F0 1GATHER1", "1GATHER1 2F0", None),
        ("1FREE0 2F0 1GATHER1", "1GATHER1 2F0 1FREE0", "number by number"),
        (" 1FREE1 ", " ", "freed fewer times"),
    ],
)
def test_weights_that_are_not_there_are_a_fault(old: str, new: str, words: str | None) -> None:
    program = changed(sharded(interleaved(1, 1, 3), 3), old, new)
    if words is None:
        verify(program).require()
        return
    with pytest.raises(UnsafeProgramError, match=words) as caught:
        verify(program).require()
    assert "remedy:" in str(caught.value)


def test_weights_without_any_computation_are_judged_too() -> None:
    program = update_program(Placement((0,)), MPI, (), zero=3)
    schedule = replace(program.schedule, microbatches=1)
    nothing = replace(program, schedule=schedule, rows=(ActionRow.parse("0GATHER0 0FREE0"),))
    assert "completeness" in {fault.rule for fault in verify(nothing).faults}


@pytest.mark.parametrize(
    ("zero", "old", "new", "words"),
    [
        (
            1,
            "0REDUCE 1STEP 1GATHER0 0STEP",
            "0STEP 0REDUCE 1STEP 1GATHER0",
            "stands before 0REDUCE .*, which it depends",
        ),
        (1, "0B0 0REDUCE 1STEP 1GATHER0 0STEP", "0STEP 0B0 0REDUCE 1STEP 1GATHER0", "whose gradient it would miss"),
        (1, " 0GATHER0", "", "the other replicas' new shards of stage 0 are never gathered"),
        (1, "0STEP 0GATHER0", "0GATHER0 0STEP", "no new shards of stage 0 to gather here"),
        (1, " 1STEP", "", "stage 1 has no STEP, other stages have"),
        (2, " 0SCATTER0", "", "never reduced"),
        (2, "0B0 0SCATTER0", "0SCATTER0 0B0", "needs the weight gradient of stage 0"),
        (
            3,
            "0FREE1 0SCATTER0 1STEP 0STEP",
            "0SCATTER0 1STEP 0STEP 0FREE1",
            "the old weights of stage 0 are in use until 0FREE1",
        ),
        (0, "0STEP", "0GATHER0 0STEP", "no new shards of stage 0 to gather here \\(ZeRO stage 0\\)"),
        (0, "0F0", "0FREE0 0F0", "the weights of stage 0 are whole all the time"),
        (0, "0F0", "0NORM 0F0", "the norm is found in an update of its own"),
        (0, "0F0", "0UNDO 1UNDO 0F0", "undone in a program without micro-batches"),
    ],
)
def test_updates_in_the_wrong_place_are_a_fault(zero: int, old: str, new: str, words: str) -> None:
    program = changed(sharded(interleaved(1, 1, 2), zero, early=True), old, new)
    with pytest.raises(UnsafeProgramError, match=words):
        verify(program).require()


def test_every_rank_takes_part_in_the_norm() -> None:
    program = update_program(Placement((0, 1)), MPI)
    with pytest.raises(UnsafeProgramError, match="rank 0 never takes part in the norm"):
        verify(changed(program, "0NORM ", "")).require()
    with pytest.raises(UnsafeProgramError, match=r"0NORM .*depends on"):
        verify(changed(program, "0NORM 0STEP", "0STEP 0NORM")).require()
    with pytest.raises(UnsafeProgramError, match="undoes 0STEP"):
        undo = update_program(Placement((0,)), MPI, (Kind.UNDO, Kind.STEP))
        verify(changed(undo, "0UNDO 0STEP", "0STEP 0UNDO")).require()


@pytest.mark.parametrize("zero", [4, -1])
def test_stages_of_zero_that_there_are_not_are_refused(zero: int) -> None:
    with pytest.raises(LayoutError, match=r"zero = -?\d must be 0 \.\. 3"):
        sharded(one_f_one_b(1, 1), zero)
    program = replace(lower(one_f_one_b(1, 1), MPI), zero=zero)
    assert "the stages of ZeRO are 0 to 3" in str(verify(program))


def test_shards_need_replicas() -> None:
    with pytest.raises(LayoutError, match="reduce = True"):
        lower(one_f_one_b(1, 1), MPI, zero=1)


def test_parts_of_an_update_that_are_none_are_refused() -> None:
    with pytest.raises(LayoutError, match="must be of NORM, UNDO and STEP"):
        update_program(Placement((0,)), MPI, (Kind.REDUCE,))


def test_actions_without_numbers_read_as_they_are_written() -> None:
    for text in ("0STEP", "1NORM", "2UNDO", "3GATHER4", "3FREE0", "2SCATTER1"):
        assert str(Action.parse(text)) == text
        assert Action.from_code(Action.parse(text).code) == Action.parse(text)
