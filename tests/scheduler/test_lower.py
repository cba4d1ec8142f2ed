"""Lowering: for every schedule and transport a program that a brute-force executor finishes and `verify` proves."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipert.scheduler.action import Action, Kind
from pipert.scheduler.costs import Costs
from pipert.scheduler.errors import LayoutError, ScheduleError
from pipert.scheduler.formats.text import dumps
from pipert.scheduler.generators.one_f_one_b import one_f_one_b
from pipert.scheduler.generators.registry import GENERATORS, generate
from pipert.scheduler.lower import lower
from pipert.scheduler.placement import Placement
from pipert.scheduler.program import Program
from pipert.scheduler.row import ActionRow
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.semantics import MPI, MPI_SYNCHRONOUS, NAMED, NCCL_GROUPED, NCCL_PAIR, Semantics
from pipert.scheduler.simulate import simulate
from pipert.scheduler.verify import verify
from tests.scheduler.brute_force import run
from tests.scheduler.layouts import ALL_SEMANTICS, any_semantics, lowering_options, schedules, v_shaped


def rows(program: Program) -> str:
    """A program's rows as text."""
    return "\n".join(map(str, program.rows))


def computations(program: Program) -> tuple[ActionRow, ...]:
    return tuple(row.computations() for row in program.rows)


# ---- every schedule on every transport ----


@given(schedules(ranks=5, chunks=3, microbatches=9), any_semantics, st.data())
@settings(max_examples=300)
def test_every_lowered_program_runs_to_its_end(schedule: Schedule, semantics: Semantics, data: st.DataObject) -> None:
    program = lower(schedule, semantics, **data.draw(lowering_options(schedule)))
    assert run(program) is None, rows(program)


@given(schedules(), any_semantics, st.data())
@settings(max_examples=300)
def test_every_lowered_program_is_proved(schedule: Schedule, semantics: Semantics, data: st.DataObject) -> None:
    options = data.draw(lowering_options(schedule))
    program = lower(schedule, semantics, **options)
    verify(program).require()
    if options["trainable_from"] == 0:
        assert computations(program) == schedule.rows


@pytest.mark.parametrize("semantics", NAMED.values(), ids=NAMED)
@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)])
def test_named_transports_take_every_small_layout(name: str, chunks: int, semantics: Semantics) -> None:
    for ranks in range(1, 6):
        for microbatches in (1, 2, 3, 4, 5, 8, 12):
            program = lower(generate(name, ranks, microbatches, chunks), semantics, reduce=True, meta=(0,))
            verify(program).require()


@given(schedules(ranks=8, microbatches=16), any_semantics.filter(lambda rules: not rules.blocking))
def test_messages_that_take_no_time_cost_no_time(schedule: Schedule, semantics: Semantics) -> None:
    costs = Costs(1, 2, input_gradient=1, weight_gradient=1)
    assert simulate(lower(schedule, semantics), costs).makespan == simulate(schedule, costs).makespan


# ---- sends and receives ----


def test_a_send_stands_behind_its_maker_and_a_receive_before_its_user() -> None:
    program = lower(one_f_one_b(2, 2), MPI, prefetch=0)
    assert rows(program) == (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    )
    assert program.groups == ()


def test_blocking_sends_meet_their_receives_in_one_order() -> None:
    program = lower(one_f_one_b(3, 3), MPI_SYNCHRONOUS)
    assert rows(program) == (
        "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2\n"
        "1RECV_F0 1F0 1RECV_F1 1SEND_F0 1F1 1RECV_F2 1SEND_F1 1RECV_B0 1B0 1SEND_B0 1F2 1SEND_F2 1RECV_B1 1B1 1SEND_B1 "
        "1RECV_B2 1B2 1SEND_B2\n"
        "2RECV_F0 2F0 2RECV_F1 2B0 2SEND_B0 2F1 2B1 2RECV_F2 2SEND_B1 2F2 2B2 2SEND_B2"
    )


def test_the_naive_program_would_deadlock_where_sends_block() -> None:
    """What lowering must avoid: the program for non-blocking MPI is no program for MPI_Ssend."""
    naive = replace(lower(one_f_one_b(4, 8), MPI, prefetch=0), semantics=MPI_SYNCHRONOUS)
    assert run(naive) is not None
    assert run(lower(one_f_one_b(4, 8), MPI_SYNCHRONOUS)) is None


def test_the_naive_program_would_swap_messages_where_they_are_matched_by_order() -> None:
    schedule = generate("interleaved", 2, 4, 2)
    naive = replace(lower(schedule, MPI, prefetch=0), semantics=NCCL_PAIR)
    assert run(naive) is not None
    assert run(lower(schedule, NCCL_PAIR)) is None


def test_v_placement_hands_over_locally_at_its_turn() -> None:
    program = lower(v_shaped(4, 3), MPI)
    assert program.placement.stages_of(3) == (3, 4)
    messages = {action for row in program.rows for action in row if action.kind.is_message}
    assert not messages & {Action(3, Kind.SEND_F, 0), Action(4, Kind.RECV_F, 0), Action(4, Kind.SEND_B, 0)}
    assert len(messages) == 2 * 2 * 6 * 3  # two ends, two directions, six boundaries, three micro-batches


@pytest.mark.parametrize("name", ["interleaved", "1f1b-eager", "dual-pipe-v"])
def test_ranks_that_are_held_by_messages_meet_between_computations(name: str) -> None:
    """Held by every message, ranks would wait half a backward for one another, again and again."""
    schedule = generate(name, 8, 32, 2 if name == "interleaved" else 1)
    costs = Costs(1, 2)
    held = simulate(lower(schedule, MPI_SYNCHRONOUS), costs).makespan
    assert held < 1.2 * simulate(schedule, costs).makespan  # not 1.4


@given(st.integers(1, 4), st.integers(1, 8), any_semantics)
def test_one_rank_sends_nothing(chunks: int, microbatches: int, semantics: Semantics) -> None:
    schedule = generate("interleaved", 1, microbatches, chunks)
    assert lower(schedule, semantics).rows == schedule.rows


def test_two_stages_of_a_rank_in_a_row_hand_over_locally_and_the_rest_by_message() -> None:
    schedule = Schedule.of(
        "custom",
        Placement.of([0, 0, 1]),
        1,
        [
            [Action(0, Kind.F), Action(1, Kind.F), Action(1, Kind.B), Action(0, Kind.B)],
            [Action(2, Kind.F), Action(2, Kind.B)],
        ],
    )
    assert rows(lower(schedule, MPI, prefetch=0)) == "0F0 1F0 1SEND_F0 1RECV_B0 1B0 0B0\n2RECV_F0 2F0 2B0 2SEND_B0"


# ---- frozen stages and evaluation ----


def test_frozen_stages_have_no_backward_and_get_no_gradient() -> None:
    program = lower(one_f_one_b(3, 2), MPI, trainable_from=1, prefetch=0)
    assert rows(program) == (
        "0F0 0SEND_F0 0F1 0SEND_F1\n"
        "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_B0 1B0 1RECV_B1 1B1\n"
        "2RECV_F0 2F0 2B0 2SEND_B0 2RECV_F1 2F1 2B1 2SEND_B1"
    )


@given(schedules(ranks=8), any_semantics)
def test_evaluation_is_forwards_only(schedule: Schedule, semantics: Semantics) -> None:
    program = lower(schedule, semantics, trainable_from=schedule.num_stages, ties=[], reduce=True)
    kinds = {action.kind for row in program.rows for action in row}
    assert kinds <= {Kind.F, Kind.SEND_F, Kind.RECV_F}
    verify(program).require()


def test_the_caller_s_trained_stages_may_be_anything_from_none_to_all() -> None:
    for wrong in (-1, 4):
        with pytest.raises(LayoutError, match=f"trainable_from = {wrong} must be in 0 .. 3"):
            lower(one_f_one_b(3, 2), MPI, trainable_from=wrong)


# ---- sizes ----


def test_sizes_travel_directly_before_their_messages() -> None:
    program = lower(one_f_one_b(2, 2), MPI, meta=[1], prefetch=0)
    assert rows(program) == (
        "0F0 0SEND_F0 0F1 0SEND_META1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n"
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_META1 1RECV_F1 1F1 1B1 1SEND_B1"
    )


@given(schedules(ranks=6, microbatches=12), any_semantics, st.data())
def test_every_message_of_a_listed_microbatch_has_its_sizes_and_no_other(
    schedule: Schedule, semantics: Semantics, data: st.DataObject
) -> None:
    listed = data.draw(st.sets(st.integers(0, schedule.microbatches - 1)))
    program = lower(schedule, semantics, meta=listed, prefetch=data.draw(st.integers(0, 3)))
    for row in program.rows:
        told = {(action.stage, action.kind) for action in row if action.kind in (Kind.SEND_META, Kind.RECV_META)}
        assert bool(told) <= bool(listed)
        for before, action in pairwise((Action(0, Kind.F), *row)):
            if action.kind in (Kind.SEND_F, Kind.RECV_F):
                meta = Kind.SEND_META if action.kind is Kind.SEND_F else Kind.RECV_META
                is_told = before == Action(action.stage, meta, action.microbatch)
                assert is_told == (action.microbatch in listed)


@pytest.mark.parametrize("meta", [(2,), (-1,), (0, 7)])
def test_sizes_of_a_microbatch_that_is_not_there_are_refused(meta: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match=r"names a micro-batch outside 0 \.\. 1"):
        lower(one_f_one_b(2, 2), MPI, meta=meta)


# ---- prefetch ----


def test_a_receive_is_posted_one_computation_early() -> None:
    assert str(lower(one_f_one_b(2, 3), MPI, prefetch=1).rows[1]) == (
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1B2 1SEND_B2"
    )


def waiting_buffers(row: ActionRow) -> list[int]:
    """At each computation how many receive buffers are live beside the one it uses itself."""
    posted: set[Action] = set()
    waiting = []
    for action in row:
        if action.kind in (Kind.RECV_F, Kind.RECV_B):
            posted.add(action)
        elif action.kind.is_compute:
            needed = Kind.RECV_F if action.kind is Kind.F else Kind.RECV_B
            posted.discard(Action(action.stage, needed, action.microbatch))
            waiting.append(len(posted))
    return waiting


@given(schedules(ranks=6, microbatches=16), any_semantics, st.integers(0, 4), st.booleans())
def test_prefetch_adds_no_more_buffers_than_it_says(
    schedule: Schedule, semantics: Semantics, prefetch: int, sized: bool
) -> None:
    meta = range(schedule.microbatches) if sized else ()
    late = lower(schedule, semantics, prefetch=0, meta=meta)
    early = lower(schedule, semantics, prefetch=prefetch, meta=meta)
    for before, after in zip(late.rows, early.rows, strict=True):
        assert sorted(before) == sorted(after)
        for least, now in zip(waiting_buffers(before), waiting_buffers(after), strict=True):
            assert least <= now <= least + prefetch
    if semantics.blocking:
        assert late.rows == early.rows


@given(
    schedules(ranks=6, microbatches=16),
    st.sampled_from([rules for rules in ALL_SEMANTICS if rules.matching == "order"]),
)
def test_prefetch_keeps_the_order_of_messages_between_any_two_ranks(schedule: Schedule, semantics: Semantics) -> None:
    programs = [lower(schedule, semantics, prefetch=prefetch) for prefetch in (0, 3)]
    for rank in range(schedule.num_ranks):
        late, early = ([action for action in program.rows[rank] if action.kind.is_message] for program in programs)
        for peer in range(schedule.num_ranks):
            for is_send in (True, False):
                assert [a for a in late if (programs[0].peer(a), a.kind.is_send) == (peer, is_send)] == [
                    a for a in early if (programs[1].peer(a), a.kind.is_send) == (peer, is_send)
                ]


def test_prefetch_hides_messages_behind_computations() -> None:
    """In GPipe a receive that waits for its turn holds up the sender; posted one computation early it does not."""
    schedule, costs = generate("gpipe", 4, 16), Costs(2, 4, comm=1)
    late, early = (simulate(lower(schedule, MPI, prefetch=prefetch), costs).makespan for prefetch in (0, 1))
    assert (late, early) == (150, 120)


def test_a_negative_prefetch_is_refused() -> None:
    with pytest.raises(LayoutError, match="prefetch = -1 must be >= 0"):
        lower(one_f_one_b(2, 2), MPI, prefetch=-1)


# ---- groups ----


def test_the_steady_exchange_of_1f1b_is_one_group() -> None:
    program = lower(one_f_one_b(4, 3), NCCL_GROUPED, prefetch=0)
    assert dumps(program).splitlines()[-1] == (
        "rank 3: 3RECV_F0 3F0 3RECV_F1 3B0 3SEND_B0 3F1 3B1 {3RECV_F2 3SEND_B1} 3F2 3B2 3SEND_B2"
    )
    assert program.spans(3) == ((7, 9),)


@given(schedules(ranks=6, microbatches=12), any_semantics, st.booleans())
def test_a_group_is_a_send_and_a_receive_with_one_peer(schedule: Schedule, semantics: Semantics, sized: bool) -> None:
    program = lower(schedule, semantics, meta=[0] if sized else [])
    if not semantics.grouped:
        assert program.groups == ()
    for rank in range(program.num_ranks):
        for start, stop in program.spans(rank):
            one, other = program.rows[rank][start:stop]
            assert program.peer(one) == program.peer(other)
            assert one.kind.is_send != other.kind.is_send


@pytest.mark.parametrize("name", GENERATORS)
def test_exchanges_in_groups_are_safe_in_every_schedule(name: str) -> None:
    """A group holds back what it receives until what it sends is taken."""
    made = 0
    for ranks, microbatches, prefetch in product((2, 3, 4), (1, 4, 5, 8), (0, 1, 3)):
        schedule = generate(name, ranks, microbatches, 2 if GENERATORS[name].chunked else 1)
        program = lower(schedule, NCCL_GROUPED, meta=(0,), prefetch=prefetch)
        verify(program).require()
        made += sum(map(len, program.groups))
    assert made


# ---- reductions and ties ----


def test_each_stage_is_reduced_when_its_last_gradient_is_there() -> None:
    assert rows(lower(one_f_one_b(2, 2), MPI, reduce=True, prefetch=0)) == (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE\n"
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE"
    )


@given(schedules(ranks=8, microbatches=12), any_semantics, st.data())
def test_reductions_come_last_stage_first_whatever_the_number_of_microbatches(
    schedule: Schedule, semantics: Semantics, data: st.DataObject
) -> None:
    options = data.draw(lowering_options(schedule)) | {"reduce": True, "meta": (), "alike": False}
    program = lower(schedule, semantics, **options)
    for rank, row in enumerate(program.rows):
        reduced = [action.stage for action in row if action.kind is Kind.REDUCE]
        own = [stage for stage in program.placement.stages_of(rank) if stage >= program.trainable_from]
        assert reduced == sorted(own, reverse=True)


@given(schedules(ranks=8, microbatches=12), any_semantics)
def test_nothing_is_computed_between_a_stage_s_last_gradient_and_its_reduction(
    schedule: Schedule, semantics: Semantics
) -> None:
    program = lower(schedule, semantics, reduce=True)
    for row in map(list, program.rows):
        for stage in {action.stage for action in row}:
            last = max(i for i, action in enumerate(row) if action.stage == stage and action.kind in (Kind.B, Kind.W))
            between = row[last + 1 : row.index(Action(stage, Kind.REDUCE))]
            assert not [action for action in between if action.kind.is_compute]


def test_ties_come_at_the_end_in_one_order_and_hold_up_no_reduction() -> None:
    program = lower(one_f_one_b(3, 1), MPI, ties=[(0, 2), (1, 2)], reduce=True, prefetch=0)
    assert rows(program) == (
        "0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE 0TIE0\n"
        "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0 1REDUCE 1TIE1\n"
        "2RECV_F0 2F0 2B0 2SEND_B0 2REDUCE 2TIE0 2TIE1"
    )
    assert program.ties == ((0, 2), (1, 2))


def test_a_rank_with_two_copies_names_both() -> None:
    program = lower(generate("interleaved", 2, 1, 2), MPI, ties=[(0, 2, 3)])
    assert [str(row).split()[-2:] for row in program.rows] == [["0TIE0", "2TIE0"], ["1SEND_B0", "3TIE0"]]


def test_a_frozen_tie_is_left_out_and_keeps_its_number() -> None:
    program = lower(one_f_one_b(4, 1), MPI, trainable_from=2, ties=[(0, 1), (2, 3)])
    assert program.ties == ((0, 1), (2, 3))
    assert [action for row in program.rows for action in row if action.kind is Kind.TIE] == [
        Action(2, Kind.TIE, 1),
        Action(3, Kind.TIE, 1),
    ]


@pytest.mark.parametrize(
    ("ties", "words"),
    [
        ([(0,)], "must name two or more different stages of 0 .. 3"),
        ([(0, 0)], "must name two or more different stages of 0 .. 3"),
        ([(1, 2), (1, 4)], r"ties\[1\] = \(1, 4\) must name two or more different stages of 0 .. 3"),
        ([(0, 3)], r"ties\[0\] = \(0, 3\) has stages below trainable_from = 1, which get no gradient"),
    ],
)
def test_ties_that_make_no_sense_are_refused(ties: list[tuple[int, ...]], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        lower(one_f_one_b(4, 2), MPI, ties=ties, trainable_from=1)


# ---- what cannot be lowered ----


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("0F0 0F1 0B0 0B7", "rank 0, action 3: 0B7 cannot be lowered"),
        ("0F0 1F0", "rank 0, action 1: 1F0 cannot be lowered"),
        ("0F0 0SEND_F0", "rank 0, action 1: 0SEND_F0 cannot be lowered"),
        ("5F0", "rank 0, action 0: 5F0 cannot be lowered"),
    ],
)
def test_actions_out_of_range_are_refused_with_rank_and_place(row: str, words: str) -> None:
    schedule = Schedule("custom", Placement.linear(2), 2, (ActionRow.parse(row), ActionRow.parse("1F0 1B0")))
    with pytest.raises(ScheduleError, match=words):
        lower(schedule, MPI)


def test_a_missing_row_is_refused() -> None:
    with pytest.raises(ScheduleError, match="1 rows for a placement on 2 ranks"):
        lower(Schedule("custom", Placement.linear(2), 1, (ActionRow.parse("0F0 0B0"),)), MPI)


@given(any_semantics)
def test_a_schedule_that_waits_for_itself_is_lowered_as_it_is_and_left_to_the_verifier(semantics: Semantics) -> None:
    cyclic = (ActionRow.parse("0B0 0F0"), ActionRow.parse("1F0 1B0"))
    program = lower(Schedule("custom", Placement.linear(2), 1, cyclic), semantics)
    assert computations(program) == cyclic
    assert run(program) is not None
    assert not verify(program).ok


# ---- cost ----


@pytest.mark.parametrize("semantics", [MPI, NCCL_PAIR, NCCL_GROUPED, MPI_SYNCHRONOUS], ids=lambda rules: rules.name)
def test_a_million_computations_are_lowered(semantics: Semantics) -> None:
    schedule = generate("interleaved", 64, 1024, 8)
    lower(generate("interleaved", 8, 1024, 2), semantics)  # compile
    program = lower(schedule, semantics, reduce=True)
    assert sum(map(len, program.rows)) == 2**20 + 2 * 2 * 511 * 1024 + 512


def test_a_small_program_compiles_nothing() -> None:
    code = (
        "import sys\n"
        "from pipert.scheduler.generators.registry import generate\n"
        "from pipert.scheduler.lower import lower\n"
        "from pipert.scheduler.semantics import NCCL_PAIR\n"
        "lower(generate('interleaved', 8, 16, 2), NCCL_PAIR, reduce=True)\n"
        "print('numba' in sys.modules, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_lowering_is_deterministic() -> None:
    schedule = generate("interleaved", 4, 9, 3)
    for semantics in ALL_SEMANTICS:
        assert lower(schedule, semantics, reduce=True) == lower(schedule, semantics, reduce=True)
        assert np.array_equal(lower(schedule, semantics).rows[0].codes, lower(schedule, semantics).rows[0].codes)
