"""The verifier on examples: the cases from the field, every rule once, and the pictures it draws."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipert.scheduler.action import Action, Kind
from pipert.scheduler.errors import LayoutError
from pipert.scheduler.generators.gpipe import gpipe
from pipert.scheduler.generators.one_f_one_b import one_f_one_b
from pipert.scheduler.placement import Placement
from pipert.scheduler.row import ActionRow
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.semantics import (
    MPI,
    MPI_BUFFERED,
    MPI_SYNCHRONOUS,
    NCCL_DIRECTION,
    NCCL_GROUPED,
    NCCL_PAIR,
    NCCL_RANK,
    Semantics,
)
from pipert.scheduler.verify import Fault, Proof, verify
from tests.scheduler.hand_written import GOOD, crossing, places, program, schedule

# ---- case 4: two ranks that send to each other first ----


def test_two_ranks_that_send_to_each_other_first_deadlock_where_sends_wait_for_their_receivers() -> None:
    proof = verify(crossing(MPI_SYNCHRONOUS))
    assert places(proof) == [("deadlock", 0, 3, "0SEND_F1")]
    assert proof.faults[0].along == ((0, 3), (1, 2))
    words = "rank 0 waits in SEND 0F1 to rank 1, which waits in SEND 1F0 to rank 0, which waits in SEND 0F1 to rank 1"
    assert proof.faults[0].message == words


def test_two_ranks_that_send_to_each_other_first_are_safe_with_buffered_sends() -> None:
    verify(crossing(MPI_BUFFERED)).require()


def test_two_ranks_that_send_to_each_other_first_are_safe_in_a_group() -> None:
    grouped = replace(MPI_SYNCHRONOUS, grouped=True)
    assert not verify(crossing(grouped)).ok
    verify(crossing(grouped, (((3, 5),), ((2, 4),)))).require()


def test_two_ranks_that_send_to_each_other_first_deadlock_on_one_queue_per_pair_unless_grouped() -> None:
    proof = verify(crossing(NCCL_PAIR))
    assert places(proof) == [("deadlock", 0, 3, "0SEND_F1")]
    assert "whose RECV 1F1 is queued behind SEND 1F0 to rank 0" in proof.faults[0].message
    assert "whose RECV 2F0 is queued behind SEND 0F1 to rank 1" in proof.faults[0].message
    verify(crossing(NCCL_GROUPED, (((3, 5),), ((2, 4),)))).require()
    verify(crossing(NCCL_DIRECTION)).require()


# ---- case 5: the silent swap ----


SWAPPED = ("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F1 1RECV_F0 1F0 1F1")


@pytest.mark.parametrize("semantics", [NCCL_PAIR, NCCL_DIRECTION, NCCL_RANK, replace(NCCL_PAIR, buffered=True)])
def test_receives_in_another_order_than_the_sends_are_a_swap_although_nothing_hangs(semantics: Semantics) -> None:
    proof = verify(program("0 1", 2, *SWAPPED, semantics=semantics, trainable_from=2))
    assert places(proof) == [("swap", 1, 0, "1RECV_F1"), ("swap", 1, 1, "1RECV_F0")]
    assert "0SEND_F0 (rank 0, action 1)" in proof.faults[0].message


def test_receives_in_another_order_are_fine_where_messages_have_tags() -> None:
    verify(program("0 1", 2, *SWAPPED, semantics=MPI, trainable_from=2)).require()


def test_activations_and_gradients_between_two_ranks_share_one_order() -> None:
    """With looped placement the output of stage 0 and the input gradient of stage 2 both go from rank 0 to rank 1."""
    rows = (
        "0F0 0SEND_F0 2RECV_F0 2F0 2B0 0F1 0SEND_F1 2SEND_B0",
        "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1RECV_F1 1F1",
    )
    unfinished = program("0 1 0", 2, *rows, semantics=NCCL_DIRECTION, trainable_from=1)
    finished = (rows[0] + " 2RECV_F1 2F1 2B1 2SEND_B1", rows[1] + " 1SEND_F1 1RECV_B1 1B1")
    assert not verify(unfinished).ok
    proof = verify(program("0 1 0", 2, *finished, semantics=NCCL_DIRECTION, trainable_from=1))
    assert places(proof) == [("swap", 1, 3, "1RECV_B0"), ("swap", 1, 5, "1RECV_F1")]


# ---- case 6: malformed schedules ----

MALFORMED = {
    "a duplicate F": (("0F0 0F1 0F1 0B0 0B1", GOOD[1]), ("uniqueness", 0, 2, "0F1")),
    "a duplicate B": ((GOOD[0], "1F0 1B0 1F1 1B1 1B0"), ("uniqueness", 1, 4, "1B0")),
    "micro-batch 7 of 2": ((GOOD[0], "1F0 1B0 1F7 1B7"), ("bounds", 1, 2, "1F7")),
    "stage 5 of 2": (("0F0 5F1 0B0 0B1", GOOD[1]), ("bounds", 0, 1, "5F1")),
    "back-propagated twice": ((GOOD[0], "1F0 1B0 1F1 1I0 1W0"), ("uniqueness", 1, 3, "1I0")),
    "never back-propagated": ((GOOD[0], "1F0 1B0 1F1 1I0 1W0"), ("completeness", 1, None, "1B1")),
    "a missing F": (("0F0 0B0 0B1", GOOD[1]), ("completeness", 0, None, "0F1")),
    "a missing W": ((GOOD[0], "1F0 1I0 1F1 1B1"), ("completeness", 1, None, "1W0")),
    "a missing I": ((GOOD[0], "1F0 1W0 1F1 1B1"), ("completeness", 1, None, "1I0")),
    "a stage on two ranks": (("0F0 0F1 0B0 0B1 1F0", GOOD[1]), ("ownership", 0, 4, "1F0")),
    "B before its F": ((GOOD[0], "1B0 1F0 1F1 1B1"), ("dependency", 1, 0, "1B0")),
    "W before its I": ((GOOD[0], "1F0 1W0 1I0 1F1 1B1"), ("dependency", 1, 1, "1W0")),
    "a message in a schedule": (("0F0 0F1 0B0 0B1 0SEND_F0", GOOD[1]), ("bounds", 0, 4, "0SEND_F0")),
    "a cyclic wait": (("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1"), ("deadlock", 0, 1, "0B0")),
}


@pytest.mark.parametrize(("rows", "expected"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_schedules_are_rejected_with_rank_index_and_action(
    rows: tuple[str, str], expected: tuple[str, int, int | None, str]
) -> None:
    verify(schedule("0 1", 2, *GOOD)).require()
    assert expected in places(verify(schedule("0 1", 2, *rows)))


def test_a_cyclic_wait_names_both_ranks_and_what_they_wait_for() -> None:
    (fault,) = verify(schedule("0 1", 2, *MALFORMED["a cyclic wait"][0])).faults
    words = "rank 0 waits in 0B0 for 1B0 of rank 1, which waits in 1F1 for 0F1 of rank 0, which waits in 0B0"
    assert fault.message == words


def test_two_sends_without_a_receive_are_each_reported() -> None:
    rows = ("0F0 0SEND_F0 0F1 0SEND_F1", "1F0 1F1")
    proof = verify(program("0 1", 2, *rows, trainable_from=2))
    found = places(proof)
    assert ("message", 0, 1, "0SEND_F0") in found
    assert ("message", 0, 3, "0SEND_F1") in found
    assert ("dependency", 1, 0, "1F0") in found


def test_codes_that_are_no_actions_are_out_of_bounds_and_never_an_index_error() -> None:
    wild = np.array([255 << 28, 12 << 28, (1 << 62) | 5, -1, -(1 << 40), 1 << 36], dtype=np.int64)
    target = Schedule("wild", Placement.linear(1), 1, (ActionRow.from_codes(wild),))
    proof = verify(target)
    assert [fault.rule for fault in proof.faults].count("bounds") == len(wild)
    assert "unsafe" in str(proof)


def test_rows_must_be_as_many_as_the_placement_has_ranks() -> None:
    for rows in (GOOD[:1], (*GOOD, "")):
        target = Schedule("rows", Placement.linear(2), 2, tuple(map(ActionRow.parse, rows)))
        assert verify(target).faults[0].rule == "bounds"


def test_a_number_of_microbatches_that_is_far_off_takes_no_memory() -> None:
    proof = verify(schedule("0 1", 1 << 27, *GOOD))
    assert places(proof) == [("completeness", None, None, "None")]
    assert "cannot run 268,435,456 forwards" in str(proof)
    assert not verify(schedule("0 1", 0, "", "")).ok
    assert not verify(schedule("0 1", -1, "", "")).ok


@pytest.mark.parametrize("options", [{"trainable_from": -1}, {"trainable_from": 3}, {"ties": ((0, 2),)}])
def test_stages_that_a_program_does_not_have_are_out_of_bounds(options: dict[str, object]) -> None:
    proof = verify(program("0 1", 1, *STEP, **options))  # type: ignore[arg-type]
    assert proof.faults[0].rule == "bounds"
    assert str(proof)


# ---- programs ----

FORWARD = ("0F0 0SEND_F0", "1RECV_F0 1F0")
STEP = ("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0")


def faulty(expected: str, *rows: str, placement: str = "0 1", microbatches: int = 1, **options: object) -> Fault:
    proof = verify(program(placement, microbatches, *rows, **options))  # type: ignore[arg-type]
    assert expected in {fault.rule for fault in proof.faults}, str(proof)
    return next(fault for fault in proof.faults if fault.rule == expected)


def test_a_receive_must_stand_before_what_it_feeds() -> None:
    fault = faulty("dependency", "0F0 0SEND_F0", "1F0 1RECV_F0", trainable_from=2)
    assert (fault.rank, fault.index, str(fault.action)) == (1, 0, "1F0")
    assert "1RECV_F0 stands only later (action 1)" in fault.message


def test_a_send_must_stand_behind_what_it_sends() -> None:
    fault = faulty("dependency", "0SEND_F0 0F0", "1RECV_F0 1F0", trainable_from=2)
    assert (fault.rank, fault.index) == (0, 0)


def test_messages_at_the_ends_of_the_pipeline_go_nowhere() -> None:
    assert faulty("message", *FORWARD[:1], "1RECV_F0 1F0 1SEND_F0", trainable_from=2).index == 2
    assert faulty("message", "0RECV_F0 0F0 0SEND_F0", FORWARD[1], trainable_from=2).index == 0


def test_a_hand_over_within_a_rank_is_no_message() -> None:
    rows = ("0F0 0SEND_F0 1RECV_F0 1F0 1B0 0B0",)
    assert "both on rank 0" in faulty("message", *rows, placement="0 0").message


def test_a_gradient_for_a_frozen_stage_is_refused_at_both_ends() -> None:
    verify(program("0 1", 1, "0F0 0SEND_F0", "1RECV_F0 1F0 1B0", trainable_from=1)).require()
    proof = verify(program("0 1", 1, "0F0 0SEND_F0 0RECV_B0", "1RECV_F0 1F0 1B0 1SEND_B0", trainable_from=1))
    assert {place for place in places(proof) if place[0] == "message"} == {
        ("message", 0, 2, "0RECV_B0"),
        ("message", 1, 3, "1SEND_B0"),
    }


def test_a_backward_of_a_frozen_stage_is_refused() -> None:
    assert faulty("uniqueness", *STEP, trainable_from=1).action == Action(0, Kind.B, 0)


def test_the_sizes_of_a_message_come_before_it_on_both_sides() -> None:
    good = ("0F0 0SEND_META0 0SEND_F0", "1RECV_META0 1RECV_F0 1F0")
    verify(program("0 1", 1, *good, trainable_from=2)).require()
    late = faulty("dependency", good[0], "1RECV_F0 1RECV_META0 1F0", trainable_from=2)
    assert (late.rank, late.index, str(late.action)) == (1, 1, "1RECV_META0")
    faulty("dependency", "0F0 0SEND_F0 0SEND_META0", good[1], trainable_from=2)
    faulty("message", "0F0 0SEND_F0", good[1], trainable_from=2)


def test_sizes_cannot_travel_in_one_group_with_their_message() -> None:
    rows = ("0F0 0SEND_META0 0SEND_F0", "1RECV_META0 1RECV_F0 1F0")
    semantics = replace(MPI, grouped=True)
    fault = faulty("deadlock", *rows, semantics=semantics, groups=((), ((0, 2),)), trainable_from=2)
    assert fault.rank == 1
    verify(program("0 1", 1, *rows, semantics=semantics, groups=(((1, 3),), ()), trainable_from=2)).require()


@pytest.mark.parametrize(
    ("groups", "semantics"),
    [
        ((((0, 2),), ()), NCCL_GROUPED),  # holds a computation
        ((((1, 3),), ()), NCCL_GROUPED),  # leaves the row
        ((((1, 1),), ((0, 1),)), NCCL_GROUPED),  # is empty
        ((((1, 2), (1, 2)), ()), NCCL_GROUPED),  # overlaps
        ((((1, 2),),), NCCL_GROUPED),  # not for every rank
        ((((1, 2),), ()), NCCL_PAIR),  # no groups there
    ],
)
def test_groups_hold_neighbouring_messages_on_transports_that_have_groups(
    groups: tuple[tuple[tuple[int, int], ...], ...], semantics: Semantics
) -> None:
    faulty("group", *FORWARD, groups=groups, semantics=semantics, trainable_from=2)


def test_what_is_queued_behind_a_group_waits_for_all_of_it() -> None:
    """Rank 0 issues two sends as a group; rank 1 takes the second only after it got an answer that is queued behind."""
    rows = (
        "0F0 0F1 0SEND_F0 0SEND_F1 2RECV_F0 2F0 2RECV_F1 2F1",
        "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1",
    )
    semantics = replace(NCCL_GROUPED, blocking=False, channel="pair")
    options = {"semantics": semantics, "trainable_from": 3}
    groups = (((2, 4),), ())
    fault = faulty("deadlock", *rows, placement="0 1 0", microbatches=2, groups=groups, **options)
    assert "queued behind" in fault.message


#: Rank 0 takes a value from rank 1 and gives it another. What it makes of the first goes over rank 2 to rank 1, which
#: waits for that before it takes the second.
ROUND = (
    "0F0 0SEND_F0 0F1 2RECV_F0 0SEND_F1 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1",
    "1RECV_F0 1F0 1SEND_F0 4RECV_F0 4F0 1RECV_F1 1F1 1SEND_F1 4RECV_F1 4F1",
    "3RECV_F0 3F0 3SEND_F0 3RECV_F1 3F1 3SEND_F1",
)


def test_what_a_group_receives_is_there_only_when_what_it_sends_is_taken() -> None:
    """NCCL runs a group as one kernel; alone, either message would let the ranks go on."""

    def around(semantics: Semantics, *groups: tuple[tuple[int, int], ...]) -> Proof:
        return verify(program("0 1 0 2 1", 2, *ROUND, semantics=semantics, groups=groups, trainable_from=5))

    for semantics in (NCCL_PAIR, NCCL_GROUPED, NCCL_DIRECTION, MPI):
        around(semantics).require()
    proof = around(NCCL_GROUPED, ((3, 5),), (), ())
    words = (
        "rank 0 waits in RECV 2F0 from rank 1, in one group with SEND 0F1 to rank 1, which waits in RECV 4F0 from "
        "rank 2, which waits in RECV 3F0 from rank 0, which waits in RECV 2F0 from rank 1"
    )
    assert (proof.faults[0].message, proof.faults[0].along) == (words, ((0, 3), (1, 3), (2, 0)))
    assert str(proof).splitlines()[3:-2] == [
        "  rank 0  0:  0F0       0SEND_F0  0F1       2RECV_F0  0SEND_F1  2F0       2SEND_F0",
        "                                            ^^^^^^^^",
        "  rank 1  0:  1RECV_F0  1F0       1SEND_F0  4RECV_F0  4F0       1RECV_F1  1F1",
        "                                            ^^^^^^^^",
        "  rank 2  0:                                3RECV_F0  3F0       3SEND_F0  3RECV_F1",
        "                                            ^^^^^^^^",
    ]


def test_a_group_over_two_peers_is_complete_together() -> None:
    """These are two communicators of NCCL, but nothing promises that it does not launch them as one."""
    rows = (
        "0F0 0SEND_F0 0F1 0SEND_F1 3RECV_F0 3F0 3SEND_F0 3RECV_F1 3F1 3SEND_F1",
        "1RECV_F0 1F0 1SEND_F0 5RECV_F0 5F0 1RECV_F1 1F1 1SEND_F1 5RECV_F1 5F1",
        "2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1",
        "4RECV_F0 4F0 4SEND_F0 4RECV_F1 4F1 4SEND_F1",
    )
    loose = program("0 1 2 0 3 1", 2, *rows, semantics=NCCL_GROUPED, trainable_from=6)
    verify(loose).require()
    proof = verify(replace(loose, groups=(((3, 5),), (), (), ())))
    assert places(proof) == [("deadlock", 0, 4, "3RECV_F0")]
    assert "RECV 3F0 from rank 2, in one group with SEND 0F1 to rank 1, which waits in RECV 5F0" in str(proof)


def test_a_wait_at_the_end_of_a_row_is_a_wait_too() -> None:
    """Nobody is held, everything is posted, and still the queues of the two ranks never move."""
    rows = ("0F0 0F1 0SEND_F1 0SEND_F0", "1RECV_F0 1RECV_F1 1F0 1F1")
    semantics = replace(MPI, channel="rank")
    fault = faulty("deadlock", *rows, microbatches=2, semantics=semantics, trainable_from=2)
    assert fault.message == (
        "rank 0 waits at the end of its row for SEND 0F1 to rank 1, whose RECV 1F1 is queued behind RECV 1F0 from "
        "rank 0, whose SEND 0F0 is queued behind SEND 0F1 to rank 1"
    )


def test_a_long_cycle_is_told_without_its_middle() -> None:
    rows = [f"{rank}F0 {rank}SEND_F0 {rank + 12}RECV_F0 {rank + 12}F0" for rank in range(12)]
    rows = [f"{rank}RECV_F0 {row}" if rank else row for rank, row in enumerate(rows)]
    rows = [f"{row} {rank + 12}SEND_F0" if rank < 11 else row for rank, row in enumerate(rows)]
    placement = " ".join(map(str, [*range(12), *range(12)]))
    first = rows[0].replace("0F0 0SEND_F0 12RECV_F0 12F0", "12RECV_F0 12F0 0F0 0SEND_F0")
    fault = faulty("deadlock", first, *rows[1:], placement=placement, semantics=MPI_SYNCHRONOUS, trainable_from=24)
    assert len(fault.along) == 12
    assert fault.message == (
        "rank 0 waits in RECV 12F0 from rank 11, which waits in RECV 11F0 from rank 10, which waits in RECV 10F0 from "
        "rank 9, which waits in RECV 9F0 from rank 8, which waits in RECV 8F0 from rank 7, which waits in RECV 7F0 "
        "from rank 6, which waits in RECV 6F0 from rank 5, … 4 more …, which waits in RECV 1F0 from rank 0, "
        "which waits in RECV 12F0 from rank 11"
    )


# ---- collectives ----


def test_gradients_are_reduced_once_they_are_all_there() -> None:
    verify(program("0 1", 1, STEP[0] + " 0REDUCE", STEP[1] + " 1REDUCE")).require()
    fault = faulty("dependency", STEP[0] + " 0REDUCE", "1RECV_F0 1F0 1REDUCE 1B0 1SEND_B0")
    assert (fault.rank, fault.index, str(fault.action)) == (1, 2, "1REDUCE")


def test_either_all_trained_stages_are_reduced_or_none() -> None:
    fault = faulty("collective", STEP[0] + " 0REDUCE", STEP[1])
    assert (fault.rank, fault.index, str(fault.action)) == (1, None, "1REDUCE")
    frozen = ("0F0 0SEND_F0", "1RECV_F0 1F0 1B0 1REDUCE")
    verify(program("0 1", 1, *frozen, trainable_from=1)).require()
    faulty("dependency", frozen[0] + " 0REDUCE", frozen[1], trainable_from=1)


def test_every_copy_of_a_tied_weight_takes_part_in_its_sum() -> None:
    tied = (STEP[0] + " 0TIE0", STEP[1] + " 1TIE0")
    verify(program("0 1", 1, *tied, ties=((0, 1),))).require()
    assert faulty("collective", tied[0], STEP[1], ties=((0, 1),)).action == Action(1, Kind.TIE, 0)
    faulty("collective", *STEP, ties=((0, 1),))
    faulty("bounds", *tied)  # a tie that the program does not have
    three = program("0 1", 1, *tied, ties=((0, 1),))
    assert not verify(replace(three, ties=((0,),))).ok


def test_ties_are_summed_before_or_after_reductions_but_everywhere_alike() -> None:
    before = (STEP[0] + " 0TIE0 0REDUCE", STEP[1] + " 1TIE0 1REDUCE")
    after = (STEP[0] + " 0REDUCE 0TIE0", STEP[1] + " 1REDUCE 1TIE0")
    for rows in (before, after):
        verify(program("0 1", 1, *rows, ties=((0, 1),))).require()
    assert "the sum would mix the two" in faulty("collective", before[0], after[1], ties=((0, 1),)).message


def test_two_ties_are_summed_in_the_same_order_everywhere() -> None:
    ties = ((0, 1), (0, 1))
    verify(program("0 1", 1, STEP[0] + " 0TIE0 0TIE1", STEP[1] + " 1TIE0 1TIE1", ties=ties)).require()
    faulty("collective", STEP[0] + " 0TIE0 0TIE1", STEP[1] + " 1TIE1 1TIE0", ties=ties)


def test_a_rank_that_waits_for_a_tie_before_it_sends_what_the_others_need_deadlocks() -> None:
    rows = (STEP[0] + " 0TIE0 0REDUCE", "1RECV_F0 1F0 1B0 1TIE0 1REDUCE 1SEND_B0")
    fault = faulty("deadlock", *rows, ties=((0, 1),))
    words = "rank 0 waits in RECV 0B0 from rank 1, which waits in 1TIE0, while rank 0 waits in RECV 0B0 from rank 1"
    assert fault.message == words


# ---- activation limits ----


def test_limits_are_judged_per_rank_and_name_the_forward_that_is_too_much() -> None:
    target = one_f_one_b(4, 8)
    verify(target, limits=4).require()
    verify(target, limits=[4, 3, 2, 1]).require()
    assert places(verify(target, limits=[4, 3, 1, 1])) == [("limit", 2, 1, "2F1")]
    assert places(verify(gpipe(2, 3), limits=2)) == [("limit", 0, 2, "0F2"), ("limit", 1, 2, "1F2")]


def test_a_split_backward_frees_its_activations_with_the_weight_half() -> None:
    rows = ("0F0 0I0 0F1 0I1 0W0 0W1",)
    assert verify(schedule("0", 2, *rows), limits=2).ok
    assert places(verify(schedule("0", 2, *rows), limits=1)) == [("limit", 0, 2, "0F1")]


def test_limits_must_fit_the_ranks() -> None:
    with pytest.raises(LayoutError, match="3 limits for 4 ranks; give one number, or one for each rank"):
        verify(one_f_one_b(4, 8), limits=[1, 2, 3])


@given(st.integers(1, 6), st.integers(1, 12))
def test_one_f_one_b_keeps_at_most_the_published_number_of_microbatches(ranks: int, microbatches: int) -> None:
    peaks = [min(microbatches, ranks - rank) for rank in range(ranks)]
    assert verify(one_f_one_b(ranks, microbatches), limits=peaks).ok
    for rank in range(ranks):
        tighter = [peak - (at == rank) for at, peak in enumerate(peaks)]
        assert [fault.rank for fault in verify(one_f_one_b(ranks, microbatches), limits=tighter).faults] == [rank]
