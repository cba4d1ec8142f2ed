"""`pipert schedule`: what it prints, its exit codes, and that it starts quickly without torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipert.cli import main
from pipert.scheduler.formats.text import dumps, loads
from pipert.scheduler.generators.registry import GENERATORS, generate
from pipert.scheduler.lower import lower
from pipert.scheduler.semantics import MPI, NAMED, NCCL_PAIR

DEADLOCK = """\
pipert-program 1
name both-send-first
microbatches 1
placement 0 1 0
transport mpi-synchronous
rank 0: 0F0 0SEND_F0 2RECV_F0 2F0 2B0 2SEND_B0 0RECV_B0 0B0
rank 1: 1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0
"""


class Outcome:
    """Exit code and output of one call."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def pipert_schedule(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Call `pipert schedule words` in this process."""

    def call(*words: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["pipert", "schedule", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main()
        return Outcome(int(stop.value.code or 0), *capsys.readouterr())

    return call


# ---- list and show ----


def test_list_names_every_schedule_and_transport(pipert_schedule) -> None:
    done = pipert_schedule("list")
    assert done.code == 0
    assert all(re.search(rf"^  {name} ", done.out, re.MULTILINE) for name in [*GENERATORS, *NAMED])


def test_show_prints_the_order_of_every_rank(pipert_schedule) -> None:
    done = pipert_schedule("show", "1f1b", "--ranks", 2, "--microbatches", 2)
    assert done.code == 0
    assert done.out == "rank 0 │0F0 0F1 0B0 0B1\nrank 1 │1F0 1B0 1F1 1B1\n"


def test_show_with_a_transport_prints_the_messages_too(pipert_schedule) -> None:
    done = pipert_schedule("show", "gpipe", "--ranks", 2, "--microbatches", 1, "--transport", "nccl-pair")
    words = " ".join(done.out.split())
    assert words == "rank 0 │0F0 0SEND_F0 0RECV_B0 0B0 rank 1 │1RECV_F0 1F0 1B0 1SEND_B0"


def test_show_as_text_can_be_saved_edited_and_read_again(pipert_schedule, tmp_path: Path) -> None:
    text = pipert_schedule("show", "interleaved", "--ranks", 2, "--chunks", 2, "--text").out
    assert loads(text) == generate("interleaved", 2, 8, 2)
    (tmp_path / "mine.txt").write_text(text)
    assert pipert_schedule("show", tmp_path / "mine.txt", "--text").out == text
    lowered = pipert_schedule("show", tmp_path / "mine.txt", "--transport", "mpi", "--text").out
    assert loads(lowered) == lower(generate("interleaved", 2, 8, 2), MPI)


@pytest.mark.parametrize("command", ["show", "simulate"])
def test_the_picture_is_an_svg_file(pipert_schedule, tmp_path: Path, command: str) -> None:
    assert pipert_schedule(command, "1f1b", "--svg", tmp_path / "picture.svg").code == 0
    picture = (tmp_path / "picture.svg").read_text()
    assert picture.startswith("<svg")
    assert "3B7" in picture


def test_a_picture_that_cannot_be_written_is_a_usage_error(pipert_schedule, tmp_path: Path) -> None:
    done = pipert_schedule("show", "1f1b", "--svg", tmp_path / "missing" / "picture.svg")
    assert done.code == 2
    assert "cannot be written: No such file or directory" in done.err


# ---- check ----


@pytest.mark.parametrize("transport", NAMED)
@pytest.mark.parametrize("name", GENERATORS)
def test_check_proves_every_schedule_on_every_transport(pipert_schedule, name: str, transport: str) -> None:
    done = pipert_schedule("check", name, "--transport", transport)
    assert done.code == 0
    stages = 4 * GENERATORS[name].stages
    assert done.out.startswith(f"safe: {name}, 4 ranks, {stages} stages, 8 micro-batches, for {transport}")


def test_check_judges_the_schedule_alone_without_a_transport(pipert_schedule) -> None:
    done = pipert_schedule("check", "interleaved", "--ranks", 3, "--chunks", 2, "--microbatches", 7)
    assert done.code == 0
    assert done.out.startswith("safe: interleaved, 3 ranks, 6 stages, 7 micro-batches\n")


def test_check_shows_a_deadlock_and_ends_with_1(pipert_schedule, tmp_path: Path) -> None:
    crossing = DEADLOCK.replace("0SEND_F0 2RECV_F0 2F0", "2RECV_F0 0SEND_F0 2F0")
    (tmp_path / "file.txt").write_text(crossing)
    done = pipert_schedule("check", tmp_path / "file.txt")
    assert done.code == 1
    assert done.out.startswith("unsafe: both-send-first")
    assert "deadlock" in done.out and "rank 0" in done.out and "rank 1" in done.out
    (tmp_path / "file.txt").write_text(DEADLOCK)
    assert pipert_schedule("check", tmp_path / "file.txt").code == 0


def test_check_judges_a_program_as_it_is_under_another_transport(pipert_schedule, tmp_path: Path) -> None:
    """A receive just before its use is right for MPI; where messages queue it comes too late for the sender."""
    program = lower(generate("interleaved", 2, 4, 2), MPI, prefetch=0)
    (tmp_path / "mpi.txt").write_text(dumps(program))
    assert pipert_schedule("check", tmp_path / "mpi.txt").code == 0
    done = pipert_schedule("check", tmp_path / "mpi.txt", "--transport", "nccl-pair")
    assert done.code == 1
    assert "deadlock at rank 0" in done.out
    (tmp_path / "nccl.txt").write_text(dumps(lower(program.schedule, NCCL_PAIR)))
    assert pipert_schedule("check", tmp_path / "nccl.txt").code == 0


def test_check_shows_a_fault_of_the_schedule_without_messages(pipert_schedule, tmp_path: Path) -> None:
    text = dumps(generate("1f1b", 2, 2)).replace("1F0 1B0", "1B0 1F0")
    (tmp_path / "file.txt").write_text(text)
    done = pipert_schedule("check", tmp_path / "file.txt", "--transport", "mpi")
    assert done.code == 1
    assert "1B0 needs the output of stage 1" in done.out
    assert "SEND" not in done.out


@pytest.mark.parametrize(("limit", "code"), [("4", 0), ("4,3,2,1", 0), ("3", 1), ("4,3,2,0", 1)])
def test_check_holds_a_schedule_to_its_limit_of_live_activations(pipert_schedule, limit: str, code: int) -> None:
    assert pipert_schedule("check", "1f1b", "--limit", limit).code == code
    assert pipert_schedule("check", "1f1b", "--transport", "mpi", "--limit", limit).code == code


# ---- simulate ----


def test_simulate_prints_makespan_bubble_idle_time_and_peaks(pipert_schedule) -> None:
    done = pipert_schedule("simulate", "1f1b")
    assert done.code == 0
    assert "makespan 33, bubble 27.27%" in done.out  # 3/11
    assert [line.split() for line in done.out.splitlines()[-5:]] == [
        ["rank", "idle", "share", "live"],
        ["0", "9", "27.3%", "4"],
        ["1", "9", "27.3%", "3"],
        ["2", "9", "27.3%", "2"],
        ["3", "9", "27.3%", "1"],
    ]
    assert "bubble 15.79%" in pipert_schedule("simulate", "interleaved", "--chunks", 2).out  # 3/19


def test_simulate_gives_the_figures_of_1f1b_for_any_number_of_microbatches(pipert_schedule) -> None:
    done = pipert_schedule("simulate", "1f1b", "--microbatches", 100_000_000)
    assert done.out.splitlines() == [
        "makespan 3e+08, bubble 0.00%",
        "rank  idle  share  live",
        "   0     9   0.0%     4",
        "   1     9   0.0%     3",
        "   2     9   0.0%     2",
        "   3     9   0.0%     1",
    ]


def test_an_interleaved_schedule_takes_a_group_size(pipert_schedule) -> None:
    words = ("--ranks", 2, "--chunks", 2, "--microbatches", 8, "--group-size", 4, "--text")
    assert loads(pipert_schedule("show", "interleaved", *words).out) == generate("interleaved", 2, 8, 2, group=4)
    assert "has no groups" in pipert_schedule("show", "gpipe", "--group-size", 4).err
    assert pipert_schedule("compare", "1f1b", "interleaved", "--microbatches", 16, "--group-size", 8).code == 0
    assert pipert_schedule("diff", "interleaved", "1f1b", "--chunks", 2, "--group-size", 8).code == 1


def test_simulate_takes_times_for_each_stage_and_messages(pipert_schedule) -> None:
    done = pipert_schedule(
        "simulate", "gpipe", "--ranks", 2, "--microbatches", 1, "--forward", "1,2", "--backward", "3,4", "--comm", "0.5"
    )
    assert "makespan 11, " in done.out
    lowered = pipert_schedule(
        "simulate", "gpipe", "--ranks", 2, "--microbatches", 1, "--comm", "1", "--transport", "mpi"
    )
    assert "makespan 8, " in lowered.out


def test_simulate_refuses_what_cannot_run_with_1(pipert_schedule, tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text(dumps(generate("1f1b", 2, 2)).replace("0F0 0F1 0B0", "0F0 0B0 0B1"))
    done = pipert_schedule("simulate", tmp_path / "file.txt")
    assert done.code == 1
    assert done.out


# ---- other systems' files ----

SENDER = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
RECEIVERS = {  # in the order in which rank 0 sends, or in another
    "right": "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n",
    "swap": "1RECV_F1,1RECV_F0,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n",
}


def test_check_reads_torch_csv_and_judges_it_on_a_transport(pipert_schedule, tmp_path: Path) -> None:
    (tmp_path / "right.csv").write_text(SENDER + RECEIVERS["right"])
    (tmp_path / "swap.csv").write_text(SENDER + RECEIVERS["swap"])
    assert pipert_schedule("check", tmp_path / "right.csv", "--transport", "mpi").code == 0
    assert pipert_schedule("check", tmp_path / "swap.csv", "--transport", "mpi").code == 0  # by tag
    for transport in ("nccl", "rccl"):
        for group in ("pair", "direction", "rank", "none"):
            done = pipert_schedule("check", tmp_path / "swap.csv", "--transport", transport, "--group", group)
            assert done.code == 1
            assert f"for {transport}-{group}" in done.out
            assert "swap" in done.out and "1RECV_F1" in done.out
    assert pipert_schedule("check", tmp_path / "right.csv", "--transport", "rccl", "--group", "direction").code == 0


@pytest.mark.parametrize("source", ["-", "/dev/stdin", "<(cat)"])
def test_a_schedule_may_come_through_a_pipe(source: str) -> None:
    words = f"{sys.executable} -m pipert schedule check {source} --transport mpi"
    text = dumps(generate("zb-h1", 2, 3))
    done = subprocess.run(["bash", "-c", words], input=text, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("safe: zb-h1, 2 ranks, 2 stages, 3 micro-batches, for mpi\n")


def test_what_a_file_has_that_is_left_out_is_told_on_standard_error(pipert_schedule, tmp_path: Path) -> None:
    (tmp_path / "file.csv").write_text("0UNSHARD,0F0,0B0,0REDUCE_GRAD\n")
    done = pipert_schedule("check", tmp_path / "file.csv")
    assert done.code == 0
    assert done.err == "left out: 1 UNSHARD, 1 REDUCE_GRAD; sharding is no part of a schedule\n"


def test_show_as_csv_is_read_again(pipert_schedule, tmp_path: Path) -> None:
    (tmp_path / "zb-v.csv").write_text(pipert_schedule("show", "zb-v", "--csv").out)
    assert pipert_schedule("diff", "zb-v", tmp_path / "zb-v.csv").code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--group", "pair"], "needs --transport"),
        (
            ["--transport", "nccl", "--group", "peer"],
            "no group is called 'peer'; there are pair, direction, rank, none",
        ),
        (["--transport", "rcl"], "no transport is called 'rcl'; did you mean rccl?"),
        (["--format", "tensorflow"], "no format is called 'tensorflow'; there are auto, pipert, torch"),
        (["--format", "deepspeed"], "is no instruction"),
    ],
)
def test_wrong_formats_and_transports_end_with_2(
    pipert_schedule, tmp_path: Path, words: list[str], message: str
) -> None:
    (tmp_path / "file.csv").write_text("0F0,0B0\n")
    done = pipert_schedule("check", tmp_path / "file.csv", *words)
    assert done.code == 2
    assert message in done.err


# ---- diff and compare ----


def test_diff_shows_the_first_difference_of_every_rank(pipert_schedule) -> None:
    done = pipert_schedule("diff", "1f1b", "zb-h1", "--ranks", 2, "--microbatches", 3)
    assert done.code == 1
    assert (
        done.out
        == """\
a: 1f1b, 2 ranks, 2 stages, 3 micro-batches
b: zb-h1, 2 ranks, 2 stages, 3 micro-batches
rank 0: 6 and 9 actions, the first difference at action 2
  a  0F0 0F1 0B0 0F2 0B1 0B2
  b  0F0 0F1 0I0 0W0 0F2 0I1
             ^^^
  only in a: 3 B, from 0B0 on
  only in b: 3 I, 3 W, from 0I0 on
rank 1: 6 and 9 actions, the first difference at action 1
  a   1F0 1B0 1F1 1B1 1F2
  b   1F0 1I0 1F1 1I1 1W0
          ^^^
  only in a: 3 B, from 1B0 on
  only in b: 3 I, 3 W, from 1I0 on
"""
    )


def test_diff_of_the_same_is_no_difference(pipert_schedule) -> None:
    done = pipert_schedule("diff", "1f1b", "interleaved")
    assert (done.code, done.out.splitlines()[-1]) == (0, "no difference")
    done = pipert_schedule("diff", "gpipe", "looped-bfs", "--transport", "nccl", "--group", "rank")
    assert done.code == 0
    assert "for nccl-rank" in done.out


def test_diff_tells_what_differs_beside_the_rows(pipert_schedule) -> None:
    done = pipert_schedule("diff", "1f1b", "zb-v", "--ranks", 2)
    assert "stages are on ranks 0 1 in a, 0 1 1 0 in b" in done.out
    assert pipert_schedule("diff", "1f1b", "missing.txt").code == 2


def test_compare_prints_a_table_and_draws_a_picture(pipert_schedule, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    names = [*GENERATORS]
    done = pipert_schedule("compare", *names, "--svg", tmp_path / "all.svg")
    assert done.code == 0
    rows = {cells[0]: cells[1:] for cells in map(str.split, done.out.splitlines()) if cells[0] in names}
    assert [*rows] == names
    assert rows["1f1b"] == ["1", "33", "27.27%", "27.27%", "4", "33", "0.0%"]
    assert rows["interleaved"] == ["2", "28.5", "15.79%", "15.79%", "5.5", "28.5", "0.0%"]
    assert rows["zb-h2"] == ["1", "27", "11.11%", "0.00%", "7", "27", "0.0%"]
    assert rows["zb-v"] == ["2", "25.5", "5.88%", "0.00%", "4", "25.5", "0.0%"]
    picture = (tmp_path / "all.svg").read_text()
    assert all(f">{name}<" in picture for name in names)


def test_compare_on_a_transport_counts_messages(pipert_schedule) -> None:
    words = ("1f1b", "1f1b-eager", "--comm", "0.5", "--transport", "mpi")
    rows = {line.split()[0]: line.split() for line in pipert_schedule("compare", *words).out.splitlines()}
    assert float(rows["1f1b-eager"][2]) < float(rows["1f1b"][2])


def test_compare_counts_in_the_bound_only_what_a_program_runs(pipert_schedule, tmp_path: Path) -> None:
    made = lower(generate("1f1b", 4, 8), MPI, trainable_from=4)
    (tmp_path / "evaluation").write_text(dumps(made))
    done = pipert_schedule("compare", tmp_path / "evaluation")
    assert re.search(r"1f1b +1 +11 .* 11 +0.0%\n", done.out)
    rubbish = dumps(made).partition("rank 0")[0] + "".join(f"rank {rank}:\nschedule {rank}: 9F9\n" for rank in range(4))
    (tmp_path / "rubbish").write_text(rubbish)
    assert pipert_schedule("compare", tmp_path / "rubbish").code == 1


@pytest.mark.parametrize("name", ["a[/b]", "a[bold]"])
def test_compare_prints_names_as_they_are(pipert_schedule, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text(dumps(generate("1f1b", 2, 2)).replace("name 1f1b", f"name {name}"))
    done = pipert_schedule("compare", tmp_path / "file")
    assert done.code == 0
    assert f" {name} " in done.out


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_what_the_output_s_encoding_cannot_show_does_not_end_the_command(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "file").write_text(dumps(generate("1f1b", 2, 2)).replace("name 1f1b", r'name "a\ud800"'))
    call = [sys.executable, "-m", "pipert", "schedule", "check", str(tmp_path / "file")]
    done = subprocess.run(call, capture_output=True, timeout=60, env=os.environ | {"PYTHONIOENCODING": encoding})
    assert done.returncode == 0
    assert done.stdout.startswith(rb"safe: a\ud800, 2 ranks")


def test_a_trace_is_written_for_perfetto(pipert_schedule, tmp_path: Path) -> None:
    assert pipert_schedule("simulate", "zb-v", "--trace", tmp_path / "trace.json").code == 0
    assert '"name": "7I0"' in (tmp_path / "trace.json").read_text()


# ---- what cannot be read: 2 ----


@pytest.mark.parametrize("command", ["show", "check", "simulate"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["1F1B"], "LayoutError: 1F1B is neither a schedule's name nor a file; did you mean 1f1b?"),
        (["missing.txt"], "is neither a schedule's name nor a file; the names are gpipe, 1f1b, interleaved"),
        (["1f1b", "--chunks", "2"], "1f1b puts one stage on a rank, not chunks = 2"),
        (["1f1b", "--ranks", "0"], "ranks = 0 must be an integer >= 1"),
        (["1f1b", "--ranks", "two"], "Invalid value for '--ranks'"),
        (
            ["1f1b", "--format", "torhc"],
            "no format is called 'torhc'; there are auto, pipert, torch, deepspeed, megatron",
        ),
        (["1f1b", "--transport", "ncl-pair"], "no transport is called 'ncl-pair'; did you mean nccl-pair?"),
        ([], "Missing argument 'NAME|FILE'"),
    ],
)
def test_words_that_make_no_sense_end_with_2(pipert_schedule, command: str, words: list[str], message: str) -> None:
    done = pipert_schedule(command, *words)
    assert done.code == 2
    assert message in done.err
    assert done.out == ""


@pytest.mark.parametrize("command", ["show", "check", "simulate"])
def test_a_file_that_the_system_does_not_give_ends_with_2_not_with_the_code_of_a_fault(
    pipert_schedule, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "mine.txt").write_text("pipert-schedule 1\n")
    monkeypatch.setattr(Path, "open", refuse)
    done = pipert_schedule(command, tmp_path / "mine.txt")
    assert done.code == 2
    assert re.search(r"FormatError: .*mine.txt cannot be read \(Permission denied\)", done.err)
    assert pipert_schedule(command, "x" * 5000).code == 2


@pytest.mark.parametrize("command", ["show", "check", "simulate"])
def test_a_file_that_cannot_be_read_ends_with_2_and_its_line(pipert_schedule, tmp_path: Path, command: str) -> None:
    (tmp_path / "wrong.txt").write_text("pipert-schedule 1\nmicrobatches 1\nplacement 0\nrank 0: 0F0xyz\n")
    done = pipert_schedule(command, tmp_path / "wrong.txt")
    assert done.code == 2
    assert re.search(r"FormatError: .*wrong.txt, line 4, action 0: '0F0xyz' is not an action", done.err)


@pytest.mark.parametrize("command", ["show", "check", "simulate"])
def test_a_file_that_was_cut_off_between_its_rows_is_no_other_schedule(
    pipert_schedule, tmp_path: Path, command: str
) -> None:
    lines = dumps(generate("1f1b", 3, 4, 1)).splitlines(keepends=True)
    for length in range(len(lines)):
        (tmp_path / "cut.txt").write_text("".join(lines[:length]))
        done = pipert_schedule(command, tmp_path / "cut.txt")
        assert (done.code, done.out) == (2, "")
        assert "FormatError" in done.err


def test_check_says_that_a_file_may_have_been_cut_off_within_a_row(pipert_schedule, tmp_path: Path) -> None:
    text = dumps(generate("1f1b", 3, 4, 1))
    (tmp_path / "cut.txt").write_text(text[:-5])
    done = pipert_schedule("check", tmp_path / "cut.txt")
    assert done.code == 1
    assert "cut.txt ends within a line, so it may have been cut off" in done.err
    (tmp_path / "whole.txt").write_text(text.rstrip())
    assert pipert_schedule("check", tmp_path / "whole.txt").err == ""


@pytest.mark.parametrize(
    "words",
    [
        ("simulate", "1f1b", "--forward", "fast"),
        ("simulate", "1f1b", "--forward", "1,2"),
        ("simulate", "1f1b", "--backward", "-1"),
        ("check", "1f1b", "--limit", "1.5"),
        ("check", "1f1b", "--limit", "4,3"),
    ],
)
def test_numbers_that_do_not_fit_end_with_2(pipert_schedule, words: tuple[str, ...]) -> None:
    done = pipert_schedule(*words)
    assert done.code == 2
    assert done.err
    assert done.out == ""


# ---- documentation ----

DOCUMENT = Path(__file__).parents[1] / "docs" / "schedules.md"
EXAMPLES = re.findall(r"```console\n\$ pipert schedule (.*)\n((?:.*\n)*?)```", DOCUMENT.read_text())


@pytest.mark.parametrize(("words", "printed"), EXAMPLES, ids=[words for words, _ in EXAMPLES])
def test_the_documentation_shows_what_is_printed(pipert_schedule, monkeypatch, words: str, printed: str) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert pipert_schedule(*words.split()).out == printed


def test_the_picture_in_the_documentation_is_what_is_drawn_today(pipert_schedule, tmp_path: Path) -> None:
    names = ["1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dual-pipe-v"]
    pipert_schedule("compare", *names, "--svg", tmp_path / "zero-bubble.svg")
    assert (tmp_path / "zero-bubble.svg").read_text() == DOCUMENT.with_name("zero-bubble.svg").read_text()


def test_the_documentation_has_examples() -> None:
    assert len(EXAMPLES) >= 8


# ---- start ----


@pytest.mark.parametrize(
    "words", ["list", "show 1f1b", "check interleaved --chunks 2 --transport mpi", "simulate 1f1b"]
)
def test_it_imports_no_torch_mpi_or_compiler(words: str) -> None:
    code = "import atexit, sys\natexit.register(lambda: print(*sys.modules))\nfrom pipert.cli import main; main()"
    call = [sys.executable, "-c", code, "schedule", *words.split()]
    done = subprocess.run(call, capture_output=True, text=True, timeout=120, check=True)
    slow = {"torch", "mpi4py", "numba", "matplotlib", "networkx", "rich", "numpy.ma"}
    assert not set(done.stdout.splitlines()[-1].split()) & slow


def test_a_large_schedule_is_checked() -> None:
    call = [sys.executable, "-m", "pipert", "schedule", "check", "1f1b", "--ranks", "64", "--microbatches", "1024"]
    done = subprocess.run([*call, "--transport", "mpi"], capture_output=True, text=True, timeout=120, check=True)
    assert "each of 129,024 messages is sent once" in done.stdout
