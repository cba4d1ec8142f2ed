"""The text format: what is written is read again, and what is wrong in a file is named with its line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipert.scheduler.action import MAX_STAGES, MICROBATCH_MASK, Action, Kind
from pipert.scheduler.errors import FormatError
from pipert.scheduler.formats.text import dump, dumps, load, loads
from pipert.scheduler.generators.one_f_one_b import one_f_one_b
from pipert.scheduler.generators.registry import generate
from pipert.scheduler.lower import lower
from pipert.scheduler.placement import Placement
from pipert.scheduler.program import Program
from pipert.scheduler.row import ActionRow
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.semantics import MPI, NAMED, NCCL_GROUPED, Semantics
from pipert.scheduler.verify import verify
from tests.scheduler.layouts import any_semantics, lowering_options, schedules

SCHEDULE = """\
pipert-schedule 1
name 1f1b
microbatches 2
placement 0 1
rank 0: 0F0 0F1 0B0 0B1
rank 1: 1F0 1B0 1F1 1B1
"""

PROGRAM = """\
pipert-program 1
name 1f1b
microbatches 3
placement 0 1
transport nccl-grouped
tie 0 1
rank 0: 0F0 0SEND_META0 0SEND_F0 0F1 {0SEND_F1 0RECV_B0} 0B0 0F2 {0SEND_F2 0RECV_B1} 0B1 0RECV_B2 0B2 0REDUCE 0TIE0
rank 1: 1RECV_META0 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 {1RECV_F2 1SEND_B1} 1F2 1B2 1SEND_B2 1REDUCE 1TIE0
"""


# ---- writing and reading ----


def test_a_schedule_as_text() -> None:
    assert dumps(one_f_one_b(2, 2)) == SCHEDULE
    assert loads(SCHEDULE) == one_f_one_b(2, 2)


def test_a_program_as_text() -> None:
    program = lower(one_f_one_b(2, 3), NCCL_GROUPED, ties=[(0, 1)], reduce=True, meta=[0], prefetch=0)
    assert dumps(program) == PROGRAM
    assert loads(PROGRAM) == program


numbers = st.integers(0, 40) | st.integers(0, MICROBATCH_MASK)
actions = st.builds(
    lambda stage, kind, number: Action(stage, kind, number if kind.has_microbatch else 0),
    st.integers(0, 9) | st.integers(0, MAX_STAGES - 1),
    st.sampled_from(Kind),
    numbers,
)
rows = st.lists(actions, max_size=8).map(ActionRow)
placements = st.lists(st.integers(0, 3), min_size=1, max_size=6).map(
    lambda owners: Placement.of(sorted(set(owners)).index(owner) for owner in owners)
)
values = placements.flatmap(
    lambda placement: st.builds(
        Schedule,
        st.text(),
        st.just(placement),
        numbers,
        st.lists(rows, min_size=placement.num_ranks, max_size=placement.num_ranks).map(tuple),
    )
)


@given(values)
@example(Schedule('# a "name"\n of two lines', Placement.linear(1), 1, (ActionRow(),)))
def test_any_schedule_round_trips_even_one_that_makes_no_sense(schedule: Schedule) -> None:
    assert loads(dumps(schedule)) == schedule


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Any program that has as many rows as its schedule."""
    schedule = draw(values)
    own = tuple(draw(st.lists(rows, min_size=len(schedule.rows), max_size=len(schedule.rows))))
    groups = []
    for row in own:
        cuts = draw(st.lists(st.integers(0, len(row)), unique=True, max_size=4).map(sorted))
        groups.append(tuple(zip(cuts[0::2], cuts[1::2], strict=False)))
    rules = draw(any_semantics | st.sampled_from(list(NAMED.values())))
    semantics = replace(rules, name=draw(st.just(rules.name) | st.sampled_from(list(NAMED)) | st.text()))
    ties = draw(st.lists(st.lists(st.integers(0, 9), min_size=1).map(tuple), max_size=3).map(tuple))
    return Program(schedule, semantics, own, tuple(groups), draw(st.integers(0, 9)), ties)


@given(programs())
def test_any_program_round_trips_even_one_that_makes_no_sense(program: Program) -> None:
    assert loads(dumps(program)) == program


@given(schedules(ranks=6, microbatches=12), any_semantics, st.data())
def test_lowered_programs_round_trip(schedule: Schedule, semantics: Semantics, data: st.DataObject) -> None:
    program = lower(schedule, semantics, **data.draw(lowering_options(schedule)))
    assert loads(dumps(program)) == program


def test_a_file_is_written_and_read(tmp_path: Path) -> None:
    dump(one_f_one_b(2, 2), tmp_path / "mine.txt")
    assert (tmp_path / "mine.txt").read_text() == SCHEDULE
    assert load(tmp_path / "mine.txt") == one_f_one_b(2, 2)


# ---- writing by hand ----


def test_comments_blank_lines_spaces_and_the_order_of_lines_are_free() -> None:
    text = """
        # two ranks
        pipert-schedule   1   # the version
        rank 1: 1F0 1B0\t1F1   1B1# last
        placement 0  1

        microbatches 2
        rank   0 :0F0 0F1 0B0 0B1
        name "1f1b" # quoted: # is "no" comment inside quotes
    """
    assert loads(text) == one_f_one_b(2, 2)


def test_the_mark_and_the_line_ends_of_a_windows_editor_are_free(tmp_path: Path) -> None:
    text = dumps(one_f_one_b(2, 2))
    path = tmp_path / "windows.txt"
    path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert load(path) == loads("\ufeff" + text) == loads(text)


def test_a_name_is_optional() -> None:
    assert loads("pipert-schedule 1\nplacement 0\nmicrobatches 1\nrank 0: 0F0 0B0\n") == Schedule.of(
        "unnamed", Placement.linear(1), 1, [[Action(0, Kind.F), Action(0, Kind.B)]]
    )


def test_a_program_without_its_schedule_was_made_from_its_own_computations() -> None:
    program = loads(PROGRAM)
    assert isinstance(program, Program)
    assert program.schedule == one_f_one_b(2, 3)


def test_a_program_keeps_a_schedule_of_which_it_runs_a_part() -> None:
    evaluation = lower(one_f_one_b(2, 2), MPI, trainable_from=2)
    text = dumps(evaluation)
    assert text.splitlines()[-1] == "schedule 1: 1F0 1B0 1F1 1B1"
    assert loads(text) == evaluation


def test_a_transport_of_one_s_own_is_spelled_out() -> None:
    program = replace(lower(one_f_one_b(2, 2), MPI), semantics=Semantics("mine", matching="order", channel="rank"))
    line = "transport mine buffered=no blocking=no matching=order channel=rank grouped=no"
    assert line in dumps(program).splitlines()
    assert loads(dumps(program).replace(line, "transport mine channel=rank matching=order")) == program


def test_reading_does_not_judge_and_the_verifier_does() -> None:
    on_two_ranks = SCHEDULE.replace("rank 1: 1F0", "rank 1: 0F0 1F0")
    proof = verify(loads(on_two_ranks))
    assert not proof.ok
    assert "stage 0 is on rank 0" in str(proof)


# ---- what cannot be read ----


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1: there is nothing in it; begin the file with 'pipert-schedule 1' or 'pipert-program 1'"),
        ("0F0 0B0\n1F0 1B0", "line 1: '0F0 0B0' is no header; begin the file with 'pipert-schedule 1'"),
        ("pipert-schedule 2", "line 1: 'pipert-schedule 2' is no header"),
        ("# hello\n\npipert-schedule", "line 3: 'pipert-schedule' is no header"),
        (SCHEDULE + "ranks 2", "line 7: unknown word 'ranks'; did you mean 'rank'?"),
        (SCHEDULE + "0F0", "line 7: unknown word '0F0'; the words are ["),
        (SCHEDULE + "tie 0 1", "line 7: 'tie' belongs in a program; begin the file with 'pipert-program 1'"),
        (SCHEDULE + "rank 1: 1F0", "line 7: rank 1 is there a second time; keep one (the first is on line 6)"),
        (SCHEDULE + "name again", "line 7: 'name' is there a second time; keep one"),
        (SCHEDULE + "rank 3: 0F0", "line 7: 3 rows, but none for rank 2; number the ranks from 0 without gaps"),
        (SCHEDULE + "rank -1: 0F0", "line 7: '-1: 0F0' is no row; write the rank, a colon and actions: 'ra"),
        (SCHEDULE + "rank 2 2F0", "line 7: '2 2F0' is no row"),
        (SCHEDULE + "rank 2: 0F0 0F0xyz", "line 7, action 1: '0F0xyz' is not an action; write stage, kind"),
        (SCHEDULE + "rank 2: 0F0 F1 0B01F1", "line 7, action 1: 'F1' is not an action"),
        (SCHEDULE + "rank 2: 0F", "line 7, action 0: '0F': F needs a micro-batch, for example 0F0"),
        (SCHEDULE + "rank 2: 0F0, 0F1", "line 7, action 0: '0F0,' is not an action"),
        (SCHEDULE + "rank 2: 0REDUCE1", "line 7, action 0: '0REDUCE1': REDUCE takes no micro-batch"),
        (SCHEDULE + "rank 2: 0X1", "line 7, action 0: '0X1' has the unknown kind 'X'; the kinds are F, B,"),
        (SCHEDULE + "rank 2: 0F999999999", "line 7, action 0: '0F999999999' is out of range"),
        (SCHEDULE + "rank 2: " + "9" * 5000 + "F0", "line 7, action 0: '9999"),
        (SCHEDULE.replace("1F0", "{1F0}"), "line 6: a group in a schedule; begin the file with 'pipert-program 1' if"),
        (SCHEDULE.replace("microbatches 2\n", ""), "line 5: no 'microbatches' in the file; add a line 'micro"),
        (SCHEDULE.replace("placement 0 1\n", ""), "line 5: no 'placement' in the file"),
        (SCHEDULE.replace("microbatches 2", "microbatches two"), "line 3: 'two' is no number; write one number"),
        (SCHEDULE.replace("microbatches 2", "microbatches " + "2" * 5000), "line 3: '2222"),
        (SCHEDULE.replace("0 1\n", "0, 1\n"), "line 4: '0, 1' is no list of numbers; write the rank of every stage"),
        (SCHEDULE.replace("0 1\n", "0 2\n"), "line 4: a rank without a stage; placement (0, 2) must use every rank"),
        (SCHEDULE.replace("1f1b", "one f one b"), "line 2: 'f one b' behind the name; write one word, or"),
        (SCHEDULE.replace("1f1b", '"1f1b'), "line 2: \"1f1b is no JSON string"),
        (SCHEDULE.replace("1f1b", ""), "line 2: the name is missing"),
        (PROGRAM.replace("nccl-grouped", "ncl-grouped"), "line 5: no transport is called 'ncl-grouped'; did you mean"),
        (PROGRAM.replace("nccl-grouped", "mpi tag=yes"), "line 5: 'tag=yes' is no option; write key=value"),
        (PROGRAM.replace("transport nccl-grouped\n", ""), "line 7: no 'transport' in the file"),
        (PROGRAM.replace("0RECV_B0}", "0RECV_B0"), "line 7: a '{' out of place behind 8 actions; write groups as"),
        (PROGRAM.replace("{0SEND_F2", "0SEND_F2"), "line 7: a '}' out of place behind 10 actions"),
        (PROGRAM.replace("{0SEND_F1 0RECV_B0}", "{}"), "line 7: a '}' out of place behind 4 actions"),
        (PROGRAM.replace("0REDUCE 0TIE0", "{0REDUCE 0TIE0"), "line 7: the group behind 13 actions has no end"),
        (SCHEDULE[: SCHEDULE.index("rank 1")], "line 5: 1 'rank' rows for a placement on 2 ranks; give each rank one"),
        (SCHEDULE[: SCHEDULE.index("rank 0")], "line 4: 0 'rank' rows for a placement on 2 ranks"),
        (SCHEDULE + "rank 2: 2F0", "line 7: 3 'rank' rows for a placement on 2 ranks"),
        (PROGRAM + "schedule 0: 0F0", "line 9: 1 'schedule' rows for a placement on 2 ranks"),
        (PROGRAM.replace("tie 0 1", "tie"), "line 6: '' is no list of numbers; write the stages with a copy"),
        (PROGRAM + "schedule 0: {0F0 0F1}", "line 9: a group in a schedule; only the 'rank' rows of a program"),
    ],
)  # fmt: skip
def test_a_malformed_file_is_refused_with_its_line_and_a_remedy(text: str, words: str) -> None:
    with pytest.raises(FormatError) as refusal:
        loads(text)
    assert str(refusal.value).startswith(words)


@given(st.text() | st.builds(lambda cut, junk: PROGRAM[:cut] + junk + PROGRAM[cut:], st.integers(0, 500), st.text()))
def test_no_text_makes_the_reader_stumble(text: str) -> None:
    try:
        value = loads(text)
    except FormatError:
        return
    assert loads(dumps(value)) == value


def test_a_file_that_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    with pytest.raises(FormatError, match=r"picture.png is no UTF-8 text"):
        load(tmp_path / "picture.png")
    (tmp_path / "wrong.txt").write_text("hello")
    with pytest.raises(FormatError, match=r"wrong.txt, line 1: 'hello' is no header"):
        load(tmp_path / "wrong.txt")


# ---- what cannot be written ----

WHOLE = lower(one_f_one_b(1, 1), MPI)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (replace(WHOLE, groups=(((0, 1), (0, 2)),)), r"rank 0: group \[0, 2\) is empty, overlaps"),
        (replace(WHOLE, groups=(((1, 1),),)), r"rank 0: group \[1, 1\) is empty"),
        (replace(WHOLE, groups=(((1, 9),),)), r"rank 0: group \[1, 9\)"),
        (replace(WHOLE, groups=(((0, 1),), ((0, 1),))), "groups for 2 ranks in a program of 1"),
        (replace(WHOLE, schedule=replace(WHOLE.schedule, rows=())), "0 rows for a placement on 1 ranks have no text"),
        (replace(WHOLE, rows=(*WHOLE.rows, ActionRow())), "2 rows for a placement on 1 ranks have no text form; give"),
        (replace(WHOLE.schedule, rows=(ActionRow.from_codes([200 << 28]),)), r"rank 0, action 0: the code"),
        (replace(WHOLE.schedule, microbatches=-1), "microbatches = -1 has no text form"),
        (replace(WHOLE, trainable_from=-1), "trainable_from -1, .* have no text form"),
        (replace(WHOLE, ties=((),)), r"ties \(\(\),\) have no text form"),
        (replace(WHOLE, ties=((0, -1),)), "have no text form"),
    ],
)  # fmt: skip
def test_what_has_no_spelling_is_refused(value: Any, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        dumps(value)


def test_a_million_actions_are_written_and_read() -> None:
    schedule = generate("interleaved", 64, 1024, 8)
    assert loads(dumps(schedule)) == schedule
