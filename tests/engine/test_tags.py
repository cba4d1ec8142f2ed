"""Tags: both ends agree, and no two messages that could meet share one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipert.engine.tags import message_tags
from pipert.errors import ConfigError
from pipert.scheduler.action import Action, Kind
from pipert.scheduler.generators.registry import generate
from pipert.scheduler.lower import lower
from pipert.scheduler.placement import Placement
from pipert.scheduler.program import Program
from pipert.scheduler.row import ActionRow
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.semantics import MPI, NCCL_PAIR
from tests.engine.world import SCHEDULES


@given(
    st.sampled_from(SCHEDULES),
    st.integers(1, 5),
    st.integers(1, 9),
    st.sampled_from([MPI, NCCL_PAIR]),
    st.booleans(),
    st.sampled_from([32767, 1000, 3]),
)
def test_both_ends_of_every_message_have_the_same_tag_below_the_bound(
    schedule: tuple[str, int], ranks: int, microbatches: int, semantics: object, sizes: bool, bound: int
) -> None:
    name, chunks = schedule
    program = lower(
        generate(name, ranks, microbatches, chunks),
        semantics,  # type: ignore[arg-type]
        meta=range(microbatches) if sizes else (),
    )
    tags = [message_tags(program, rank, bound) for rank in range(ranks)]
    for rank, row in enumerate(program.rows):
        for action in row:
            if action.kind.is_message:
                tag = tags[rank][action.code]
                assert 0 <= tag < bound
                assert tags[program.peer(action)][action.counterpart.code] == tag


def test_messages_of_one_direction_are_numbered_as_they_are_sent() -> None:
    program = lower(generate("interleaved", 2, 2, 2), MPI)
    tags = message_tags(program, 0, 32767)
    sent = [tags[action.code] for action in program.rows[0] if action.kind.is_send]
    assert sent == list(range(len(sent)))


def test_a_large_program_stays_under_the_smallest_bound() -> None:
    program = lower(generate("1f1b", 32, 64), MPI)
    assert max(max(message_tags(program, rank, 32767).values()) for rank in (0, 15, 31)) == 63


def test_too_few_tags_for_messages_that_could_meet_are_refused() -> None:
    sends = [Action(0, Kind.SEND_F, m) for m in range(3)]
    receives = [Action(1, Kind.RECV_F, m) for m in (2, 1, 0)]
    schedule = Schedule.of("crossed", Placement.linear(2), 3, [[], []])
    program = Program(schedule, MPI, (ActionRow(sends), ActionRow(receives)))
    assert message_tags(program, 1, 3)[Action(1, Kind.RECV_F, 2).code] == 2
    with pytest.raises(ConfigError, match="3 messages between two ranks, but only 2 tags: 1RECV_F2"):
        message_tags(program, 1, 2)
