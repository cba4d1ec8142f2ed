"""A second run in the same folder takes nothing from the first."""

from __future__ import annotations

from pathlib import Path

from pipert.report.earlier import RESULTS, keep_earlier


def test_results_of_earlier_runs_are_kept_in_the_order_of_the_runs(tmp_path: Path) -> None:
    for run in range(12):
        for name in RESULTS[: 1 + run % 2]:
            (tmp_path / name).write_text(f"run {run}")
        (tmp_path / "notes.txt").write_text("mine")
        assert keep_earlier(tmp_path) == tmp_path / f"earlier-{run + 1}"
    assert [(tmp_path / f"earlier-{run + 1}" / RESULTS[0]).read_text() for run in range(12)] == [
        f"run {run}" for run in range(12)
    ]
    assert (tmp_path / "earlier-2" / RESULTS[1]).read_text() == "run 1"
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_folder_without_results_is_left_as_it_is(tmp_path: Path) -> None:
    assert keep_earlier(tmp_path / "none") is None
    (tmp_path / "notes.txt").touch()
    assert keep_earlier(tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
