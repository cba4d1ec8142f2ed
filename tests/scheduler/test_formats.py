"""Other systems' files: PyTorch's CSV, DeepSpeed's instruction streams, Megatron's table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipert.scheduler.action import Kind
from pipert.scheduler.errors import FormatError, LayoutError
from pipert.scheduler.formats import files, instructions, megatron, torch_csv
from pipert.scheduler.formats.text import dumps as dumps_text
from pipert.scheduler.generators.gpipe import gpipe
from pipert.scheduler.generators.interleaved import interleaved
from pipert.scheduler.generators.one_f_one_b import one_f_one_b
from pipert.scheduler.generators.registry import generate
from pipert.scheduler.lower import lower
from pipert.scheduler.program import Program
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.semantics import MPI, NCCL_GROUPED, NCCL_PAIR, Semantics
from pipert.scheduler.verify import verify
from tests.scheduler.layouts import any_semantics, schedules
from tests.scheduler.torch_schedules import CLASSES, as_csv, make

# ---- torch ----


@given(schedules(ranks=6, chunks=3, microbatches=12))
def test_torch_csv_of_a_schedule_round_trips(schedule: Schedule) -> None:
    assert torch_csv.loads(torch_csv.dumps(schedule), name=schedule.name).value == schedule


@given(schedules(ranks=4, chunks=2, microbatches=6), any_semantics.filter(lambda semantics: not semantics.grouped))
def test_torch_csv_of_a_program_round_trips(schedule: Schedule, semantics: Semantics) -> None:
    program = lower(schedule, semantics)
    read = torch_csv.loads(torch_csv.dumps(program), name=schedule.name, semantics=semantics).value
    assert read == (program if any(row.kinds.max() > Kind.W for row in program.rows) else schedule)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("content", ["compute_only", "compute_comms"])
def test_the_file_that_torch_writes_is_read_and_the_one_written_here_is_read_by_torch(
    name: str, content: str, tmp_path: Path
) -> None:
    theirs, ours = tmp_path / "theirs.csv", tmp_path / "ours.csv"
    make(name, 2, 6)._dump_csv(theirs, content)
    read = files.read(theirs).value
    assert isinstance(read, Program) == (content == "compute_comms")
    ours.write_text(torch_csv.dumps(read))
    assert files.read(ours).value.rows == read.rows
    reader = make(name, 2, 6)
    reader._load_csv(ours, content)
    theirs_again = torch_csv.loads(as_csv(reader.pipeline_order_with_comms)).value
    assert [row.computations() for row in theirs_again.rows] == [row.computations() for row in read.rows]


def test_cells_of_torch_csv_mean_what_they_say() -> None:
    text = "0F0,0F1,,0SEND_F0,(0F2;0B0)OVERLAP_F_B,0UNSHARD,0I1,0W1,0RESHARD,0B2,0REDUCE_GRAD\n1RECV_F0, 1F0 ,1B0\n"
    read = torch_csv.loads(text, name="mine")
    assert isinstance(read.value, Program)
    assert [str(row) for row in read.value.rows] == ["0F0 0F1 0SEND_F0 0F2 0B0 0I1 0W1 0B2", "1RECV_F0 1F0 1B0"]
    assert read.notices == ("left out: 1 UNSHARD, 1 RESHARD, 1 REDUCE_GRAD; sharding is no part of a schedule",)
    assert (read.value.schedule.name, read.value.microbatches, read.value.semantics) == ("mine", 3, NCCL_PAIR)


@pytest.mark.parametrize("name", CLASSES)
def test_torch_s_own_schedules_are_read_and_proved(name: str) -> None:
    made = make(name, 4, 8)
    read = torch_csv.loads(as_csv(made.pipeline_order))
    verify(read.value).require()
    assert read.notices == ()
    lowered = torch_csv.loads(as_csv(made.pipeline_order_with_comms))
    verify(lowered.value).require()
    assert lowered.notices == ("left out: 8 UNSHARD, 8 REDUCE_GRAD, 8 RESHARD; sharding is no part of a schedule",)
    assert isinstance(lowered.value, Program)
    assert lowered.value.schedule == read.value


@pytest.mark.parametrize("name", ["looped-bfs", "interleaved", "zb-v", "v-half", "dual-pipe-v"])
def test_torch_accepts_what_is_exported(name: str) -> None:
    from torch.distributed.pipelining.schedules import _Action, _validate_schedule

    made = generate(name, 4, 8, chunks=2)
    lines = torch_csv.dumps(made).splitlines()
    actions = {rank: [_Action.from_str(cell) for cell in line.split(",")] for rank, line in enumerate(lines)}
    owners = _validate_schedule(actions, 4, 8, 8)
    assert tuple(owners[stage] for stage in range(8)) == made.placement.owners


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0F0,0B0\n1F0,1X0\n",
            "row 2, cell 1: torch has no kind X; the kinds are F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B$",
        ),
        ("0F0xyz\n", "row 1, cell 0: '0F0xyz' is not an action"),
        ("(0F0;1B0\n", "row 1, cell 0: .* is not an action"),
        ("0F0,0TIE0\n", "torch has no kind TIE; the kinds are F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B"),
        ("\n", "there is no action in the file"),
        ("0F0\n2F0\n", "stage 1 has no action, a later one has; number the stages from 0"),
        ("0F0,0B0\n,\n1F0,1B0\n", "a row without a stage of its own: placement .0, 2. must use every rank"),
        ("0F0,0B0\n0F1\n", "2 rows, but only 1 ranks own a stage"),
    ],
)
def test_what_is_no_torch_csv_is_refused_with_its_cell(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        torch_csv.loads(text)


def test_a_stage_on_two_ranks_is_read_and_left_to_the_verifier() -> None:
    read = torch_csv.loads("0F0,0B0,1B0\n1F0,1B0\n")
    assert {fault.rule for fault in verify(read.value).faults} & {"ownership", "uniqueness"}


def test_what_torch_cannot_spell_is_not_exported() -> None:
    with pytest.raises(FormatError, match="torch's CSV has no groups; lower the schedule for a transport without them"):
        torch_csv.dumps(lower(one_f_one_b(2, 4), NCCL_GROUPED))
    with pytest.raises(FormatError, match="rank 0: torch's CSV has no REDUCE; lower without sizes, reduce and ties"):
        torch_csv.dumps(lower(one_f_one_b(2, 4), MPI, reduce=True))


# ---- DeepSpeed ----


def deepspeed(stages: int, microbatches: int, stage: int) -> Iterator[str]:
    """The instructions of DeepSpeed's TrainSchedule, step by step: even and odd steps are forwards and backwards."""
    buffers = max(2, min(stages - stage, microbatches))

    def place(step: int) -> tuple[int, bool]:
        is_forward = step % 2 == stage % 2
        first = step // 2 - stage // 2 if step % 2 == 0 else (step - 1) // 2 - stage // 2
        if step % 2 and not stage % 2:
            first = (step - 1) // 2 - stages + 1 + stage // 2
        elif not step % 2 and stage % 2:
            first = step // 2 - stages + (stage + 1) // 2
        return first, is_forward

    before = -1
    for step in range(2 * (microbatches + stages - 1)):
        now, is_forward = place(step)
        valid, was_valid = 0 <= now < microbatches, 0 <= before < microbatches
        if is_forward:
            if was_valid and stage > 0:
                yield f"SendGrad(buffer_id={before % buffers})"
            if valid and stage > 0:
                yield f"RecvActivation(buffer_id={now % buffers})"
        else:
            if valid and stage < stages - 1:
                yield f"RecvGrad(buffer_id={now % buffers})"
            if was_valid and stage < stages - 1:
                yield f"SendActivation(buffer_id={before % buffers})"
        if stage in (0, stages - 1) and is_forward and valid:
            yield f"LoadMicroBatch(buffer_id={now % buffers})"
        if valid:
            yield f"{'Forward' if is_forward else 'Backward'}Pass(buffer_id={now % buffers})"
        before = now
    if stage > 0:
        yield f"SendGrad(buffer_id={before % buffers})" if 0 <= before < microbatches else ""
    yield from ("ReduceTiedGrads()", "ReduceGrads()", "OptimizerStep()")


def streams(stages: int, microbatches: int) -> str:
    return "\n".join(f"rank {s}: [{', '.join(deepspeed(stages, microbatches, s))}]" for s in range(stages))


@given(st.integers(2, 6), st.integers(1, 10))
def test_deepspeed_s_training_schedule_is_proved_even_with_blocking_messages(stages: int, microbatches: int) -> None:
    text = streams(stages, microbatches).replace("[, ", "[").replace(", ,", ",")
    for blocking in (False, True):
        read = instructions.loads(text, semantics=replace(NCCL_PAIR, blocking=blocking))
        verify(read.value).require()
        assert read.value.microbatches == microbatches
        assert read.notices[0].startswith(f"left out: {stages} ReduceTiedGrads, {stages} OptimizerStep; ")


def test_a_buffer_holds_the_microbatch_that_was_last_loaded_into_it() -> None:
    text = """
    stage 0:                       # comments and line breaks mean nothing
      LoadMicroBatch(0) ForwardPass(0) SendActivation(0)
      LoadMicroBatch(buffer_id=0), ForwardPass(buffer_id=0)
    stage 1: RecvActivation(1) ForwardPass(1)
    """
    read = instructions.loads(text).value
    assert [str(row) for row in read.rows] == ["0F0 0SEND_F0 0F1", "1RECV_F0 1F0"]


def test_a_buffer_overwritten_too_early_is_found() -> None:
    text = "rank 0: LoadMicroBatch(0) ForwardPass(0) LoadMicroBatch(0) ForwardPass(0) BackwardPass(0) BackwardPass(0)"
    proof = verify(instructions.loads(text).value)
    assert {(fault.rule, str(fault.action)) for fault in proof.faults} >= {("uniqueness", "0B1")}
    assert any("0B0" in str(fault) or fault.rule == "completeness" for fault in proof.faults)


@pytest.mark.parametrize("rank", ["rank {}:", "Rank {} :", "stage {}:", "stage_id={}", "rank{}: step 7:"])
def test_an_instruction_stream_may_be_pasted_as_it_was_printed(rank: str) -> None:
    steps = (
        "[LoadMicroBatch(buffer_id=0), ForwardPass(buffer_id=0)], [SendActivation(buffer_id=0)]",
        "[], [OptimizerStep()]",
    )
    text = "\n".join(f"{rank.format(stage)}\n[{step}]" for stage, step in enumerate(steps))
    text += ", [RecvActivation(buffer_id=1), ForwardPass(buffer_id=1)]"
    assert [str(row) for row in files.loads(text).value.rows] == ["0F0 0SEND_F0", "1RECV_F0 1F0"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ForwardPass(0)", "line 1: ForwardPass before any rank; begin with 'rank 0:'"),
        ("rank 0:\nForwardPas(0)", "line 2: ForwardPas is no instruction; there are ForwardPass, BackwardPass"),
        ("rank 0: ForwardPass()", r"line 1: ForwardPass names no buffer; write ForwardPass\(buffer_id=0\)"),
        ("rank 0: ForwardPass(x)", "line 1: 'x' is no buffer"),
        ("rank 0: ForwardPass(3)", "line 1: ForwardPass of buffer 3, which is empty; LoadMicroBatch it before"),
        ("rank 0: LoadMicroBatch(0) ForwardPass(0)\nrank 2: RecvActivation(0)", "no rank 1 among 2"),
        ("rank 0: ?", r"line 1: '\?' is no instruction"),
        ("", "there is no action in the file"),
    ],
)
def test_what_is_no_instruction_stream_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        instructions.loads(text)


# ---- Megatron ----


def table(microbatches: int, chunks: int, group: int) -> list[tuple[int, int]]:
    """Megatron's ``get_schedule_table``."""
    return [
        (batch, chunk)
        for start in range(0, microbatches, group)
        for chunk in range(chunks)
        for batch in range(start, min(start + group, microbatches))
    ]


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
def test_megatron_s_table_gives_the_interleaved_schedule(ranks: int, groups: int, chunks: int, more: int) -> None:
    group = ranks + more
    made = megatron.from_table(table(groups * group, chunks, group), ranks, name="interleaved")
    assert made == interleaved(ranks, groups * group, chunks, group)


def test_a_table_is_read_with_or_without_brackets_and_with_its_own_warm_up() -> None:
    plain = megatron.loads("ranks 2\n0 0\n1 0\n0 1\n1 1\n").value
    assert plain == megatron.loads("# mine\nranks 2\n[(0, 0), (1, 0),\n (0, 1), (1, 1)]").value
    assert plain.rows == interleaved(2, 2, 2).rows
    listed = files.loads("ranks = 2\nschedule_table = [(0, 0), (1, 0), (0, 1), (1, 1)]").value
    drawn = "virtual_microbatch_id | 0 1 2 3\nmicrobatch_id | 0 1 0 1\nmodel_chunk_id | 0 0 1 1\nranks: 2"
    assert files.loads(drawn).value == listed == plain
    all_forwards = megatron.loads("ranks 2\nwarmup 3, 3\n0 0\n1 0\n2 0").value
    assert all_forwards.rows == gpipe(2, 3).rows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 0", "the table says not for how many ranks it is; add a line 'ranks 4'"),
        ("ranks 2\n0 0\n1", "line 3: 1 numbers; each pair has two"),
        ("ranks 2\nzero 0", "line 2: 'zero 0' is no pair"),
        ("ranks 2", "the table has no entry"),
        ("ranks 2\nmicrobatch_id | 0 1\nmodel_chunk_id | 0", "2 micro-batches and 1 chunks; give as many"),
        ("ranks 2\nwarmup 1\n0 0", "warmup has 1 numbers for 2 ranks"),
    ],
)
def test_what_is_no_table_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        megatron.loads(text)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([(0, 0), (0, 2)], "chunks up to 2, but 2 different ones; number them from 0 without gaps"),
        ([(0, 999_999_999)], "chunks up to 999999999, but 1 different ones"),
        ([(999_999_999, 0)], "micro-batch 999999999 in a table of 1; number them from 0 without gaps"),
    ],
)
def test_a_table_with_gaps_is_refused(table: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        megatron.from_table(table, 2)


# ---- any file ----


#: Pieces of all formats; "/" stands for a space.
WORDS = """0F0 1B0 0I1 0SEND_F0 7W7 (0F0;1B0)OVERLAP_F_B 0UNSHARD , rank/0: stage/1: ForwardPass(0) RecvActivation(1) #
LoadMicroBatch(buffer_id=0) ReduceGrads() ranks/2 ranks/0 warmup/1 (0,/0) 1/1 99999999999 () [ pipert-schedule/1 ²"""
pieces = st.sampled_from([*(word.replace("/", " ") for word in WORDS.split()), "\n", "\r", " ", '"', "\x00"])


@given(
    st.lists(pieces, max_size=16).map("".join) | st.text(max_size=40),
    st.sampled_from(["auto", *files.FORMATS]),
)
def test_any_text_is_read_or_refused_as_no_file_of_its_format(text: str, format: str) -> None:
    try:
        read = files.loads(text, format)
    except (FormatError, LayoutError):
        return
    verify(read.value)  # right or wrong: it has an answer


def test_the_format_of_a_file_is_told_by_its_first_line(tmp_path: Path) -> None:
    made = one_f_one_b(2, 4)
    contents = {
        "pipert": dumps_text(made),
        "torch": "," + torch_csv.dumps(made),
        "deepspeed": "# mine\n" + streams(2, 4),
        "megatron": "ranks 2\n" + "\n".join(f"{m} 0" for m in range(4)),
    }
    for name, content in contents.items():
        assert files.detect(content) == name
        path = tmp_path / f"{name}.txt"
        path.write_text(content)
        value = files.read(path).value
        assert value == files.read(path, name).value
        assert (value.schedule if isinstance(value, Program) else value).rows == made.rows


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "wrong.csv"
    path.write_text("0F0,0Q0\n")
    with pytest.raises(FormatError, match=r"wrong.csv, row 1, cell 1: torch has no kind Q"):
        files.read(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match="is no UTF-8 text"):
        files.read(path)
    path.write_text('"0F0","0B0"\r\n', encoding="utf-8-sig")
    assert str(files.read(path).value.rows[0]) == "0F0 0B0"
    with pytest.raises(FormatError, match="no format is called 'torchh'; there are auto, pipert, torch, deepspeed"):
        files.read(path, "torchh")


def test_more_than_a_schedule_can_be_is_refused_before_it_is_read(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(files, "MOST_BYTES", 1 << 20)
    with pytest.raises(FormatError, match=r"^big has more than 1 MiB; give a smaller one$"):
        files.decode(b"#" * (1 << 20) + b"#", source="big")
    with pytest.raises(FormatError, match=r"^/dev/zero has more than 1 MiB"):
        files.read("/dev/zero")


def test_an_unknown_first_line_is_refused_with_what_pipert_expects(tmp_path: Path) -> None:
    (tmp_path / "any").write_text("hello\n")
    with pytest.raises(FormatError, match="'hello' is no header; begin the file with 'pipert-schedule 1'"):
        files.read(tmp_path / "any")


def test_older_torch_spells_the_whole_backward_bw_and_its_input_half_b() -> None:
    old = torch_csv.loads("0F0,0F1,0RECV_B0,0B0,0W0,0BW1")
    assert str(old.value.rows[0]) == "0F0 0F1 0RECV_B0 0I0 0W0 0B1"
    assert old.notices == (
        "there is a BW, so this is read as older torch's: BW is the whole backward, B its input half",
    )
