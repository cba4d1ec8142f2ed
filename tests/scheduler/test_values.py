"""Actions, rows, placements, schedules and transports: what is no such value is refused where it is made."""

from __future__ import annotations

import numpy as np
import pytest

from pipert.scheduler.action import MAX_STAGES, MICROBATCH_MASK, Action, Kind
from pipert.scheduler.errors import ActionError, LayoutError, ScheduleError, SemanticsError
from pipert.scheduler.generators.gpipe import gpipe
from pipert.scheduler.generators.one_f_one_b import one_f_one_b
from pipert.scheduler.lower import lower
from pipert.scheduler.placement import Placement
from pipert.scheduler.row import ActionRow
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.semantics import MPI, Semantics
from pipert.scheduler.verify import verify


@pytest.mark.parametrize(
    "action",
    [
        Action(0, Kind.F, MICROBATCH_MASK + 1),
        Action(0, Kind.F, -1),
        Action(MAX_STAGES, Kind.F, 0),
        Action(0, Kind.F, 1.5),  # type: ignore[arg-type]
        Action(0, "F", 0),  # type: ignore[arg-type]
        Action(0, 99, 0),  # type: ignore[arg-type]
    ],
)
def test_an_action_that_does_not_fit_into_its_bits_never_becomes_another_one(action: Action) -> None:
    with pytest.raises(ActionError):
        ActionRow([action])


def test_the_numbers_of_an_action_may_be_narrow_numpy_integers() -> None:
    row = ActionRow([Action(np.int32(5), Kind.B, np.int8(3))])  # type: ignore[arg-type]
    assert str(row) == "5B3"


@pytest.mark.parametrize("row", ["0F0 0B0", ["0F0", "0B0"], [(0, Kind.F, 0)]])
def test_a_row_of_something_else_than_actions_tells_how_to_write_one(row: object) -> None:
    with pytest.raises(ActionError, match=r"is not an Action; write Action\(.*ActionRow.parse"):
        Schedule.of("x", Placement.linear(1), 1, [row])  # type: ignore[list-item]


@pytest.mark.parametrize("owners", ["01", [0.0, 1.0], [0, None], [False, True], [0, 2], [-1, 0], [], [1, 1]])
def test_a_placement_that_is_none_is_refused(owners: list[int]) -> None:
    with pytest.raises(LayoutError, match="placement"):
        Placement.of(owners)


def test_a_rank_far_too_large_is_refused_without_counting_up_to_it() -> None:
    with pytest.raises(LayoutError, match="must use every rank from 0 on"):
        Placement.of([0, 10**18])


def test_a_placement_from_a_list_or_an_array_is_the_one_from_a_tuple() -> None:
    same = {Placement((0, 1)), Placement([0, 1]), Placement.of(np.arange(2))}  # type: ignore[arg-type]
    assert len(same) == 1


@pytest.mark.parametrize(
    ("placement", "microbatches", "rows", "message"),
    [
        ([0], 1, (ActionRow(),), "is not a Placement"),
        (Placement.linear(1), "2", (ActionRow(),), "microbatches = '2' must be an integer"),
        (Placement.linear(1), 2.5, (ActionRow(),), "microbatches = 2.5 must be an integer"),
        (Placement.linear(1), 1, ((),), "is not an ActionRow; Schedule.of"),
    ],
)
def test_a_schedule_with_fields_of_other_types_is_refused(
    placement: Placement, microbatches: int, rows: tuple[ActionRow, ...], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        Schedule("x", placement, microbatches, rows)


def test_ranks_and_microbatches_may_be_numpy_integers() -> None:
    assert gpipe(np.int64(2), np.int32(3)) == gpipe(2, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("microbatches", [0, -1, True, 2.0, "2", None, 1 << 28])
def test_a_number_of_microbatches_that_is_none_is_refused_by_generators(microbatches: int) -> None:
    with pytest.raises(LayoutError, match="microbatches = "):
        one_f_one_b(2, microbatches)


@pytest.mark.parametrize(
    "options", [{"matching": "Order"}, {"channel": "peer"}, {"buffered": "no"}, {"grouped": 1}, {"blocking": None}]
)
def test_message_rules_that_no_transport_has_are_refused_not_taken_for_others(options: dict[str, object]) -> None:
    with pytest.raises(SemanticsError, match=next(iter(options))):
        Semantics("x", **options)  # type: ignore[arg-type]


def test_lowering_for_a_name_or_lowering_twice_is_refused() -> None:
    with pytest.raises(SemanticsError, match=r"'mpi' is not a Semantics; semantics.NAMED has them by name: mpi, "):
        lower(one_f_one_b(2, 2), "mpi")  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="lowered before; lower its schedule"):
        lower(lower(one_f_one_b(2, 2), MPI), MPI)  # type: ignore[arg-type]


@pytest.mark.parametrize("limits", [2.5, "4", float("nan"), -1, [4, 3, 2, None], [4, 3, 2, -1], [4, 3, 2]])
def test_limits_that_are_no_counts_for_the_ranks_are_refused(limits: int) -> None:
    with pytest.raises(LayoutError, match="limit"):
        verify(one_f_one_b(4, 8), limits=limits)


def test_limits_may_be_numpy_integers() -> None:
    assert verify(one_f_one_b(4, 8), limits=np.int64(4)).ok  # type: ignore[arg-type]
    assert verify(one_f_one_b(4, 8), limits=np.array([4, 3, 2, 1])).ok  # type: ignore[arg-type]


def test_verifying_far_more_microbatches_than_actions_needs_no_memory_for_them() -> None:
    rows = map(ActionRow.parse, ["0F0 0B0 0W0", "1F0 1B0"])
    assert not verify(Schedule.of("x", Placement.linear(2), 10**18, rows)).ok
