"""`pipert schedule auto`: what it prints and writes, and what it refuses."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner, Result

from pipert.cli.schedule import app
from pipert.scheduler.errors import LayoutError
from pipert.scheduler.formats.text import loads
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.verify import verify


def auto(*words: object) -> Result:
    return CliRunner().invoke(app, ["auto", *map(str, words)])


def test_it_draws_the_schedule_and_tells_makespan_and_bound() -> None:
    done = auto("--ranks", 2, "--microbatches", 4, "--memory", 2)
    assert done.exit_code == 0
    assert done.output.startswith("rank 0 │F0")
    *_, found, bound = done.output.splitlines()
    assert found == "makespan 13, bubble 7.69%, live activations 2, 2"
    assert bound == "bound    13, gap 0: no schedule is faster"


def test_costs_may_differ_by_stage_and_memory_by_rank(tmp_path: Path) -> None:
    path = tmp_path / "found.txt"
    costs = "--forward", "1,1,2", "--backward", "1,1,2", "--weight", "1,1,1.5", "--comm", "0.25"
    done = auto("--ranks", 3, "--microbatches", 6, *costs, "--memory", "3,3,2", "--output", path)
    assert done.exit_code == 0
    schedule = loads(path.read_text())
    assert isinstance(schedule, Schedule)
    assert verify(schedule, limits=(3, 3, 2)).ok


def test_on_a_transport_the_program_is_drawn() -> None:
    done = auto("--ranks", 2, "--microbatches", 3, "--v", "--transport", "mpi", "--comm", "0.5", "--memory", 4)
    assert done.exit_code == 0
    assert "makespan" in done.output and "bound" in done.output


def test_what_does_not_fit_is_refused() -> None:
    assert isinstance(auto("--memory", "0").exception, LayoutError)
    assert isinstance(auto("--memory", "4,4").exception, LayoutError)
    assert auto("--forward", "long").exit_code == 2
    assert auto("--v", "--chunks", 3).exit_code == 2
