"""Metrics are lines of JSON, whatever the numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipert.errors import DataError
from pipert.report.metrics import MetricsWriter, read_metrics


def test_a_record_is_in_the_file_at_once(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "deep" / "metrics.jsonl")
    writer.write({"step": 1, "loss": 0.1 + 0.2})
    assert list(read_metrics(writer.path)) == [{"step": 1, "loss": 0.1 + 0.2}]
    writer.close()


def test_numbers_that_json_lacks_are_texts(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "m") as writer:
        writer.write({"a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": None, "e": True})
    text = (tmp_path / "m").read_text()
    record = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record == {"a": "nan", "b": "inf", "c": "-inf", "d": None, "e": True}
    assert [float(record[key]) for key in "bc"] == [float("inf"), -float("inf")]


def test_a_run_that_goes_on_appends_and_a_new_one_does_not(tmp_path: Path) -> None:
    for append in (False, True, True):
        with MetricsWriter(tmp_path / "m", append=append) as writer:
            writer.write({"step": 1})
    assert len(list(read_metrics(tmp_path / "m"))) == 3
    MetricsWriter(tmp_path / "m").close()
    assert list(read_metrics(tmp_path / "m")) == []


def test_an_unfinished_last_line_is_left_out_and_other_faults_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_text('{"step": 1}\n{"st')
    assert list(read_metrics(path)) == [{"step": 1}]
    path.write_text('{"step": 1}\n[3]\n{"step": 2}\n')
    with pytest.raises(DataError, match=r"line 2 is not a record of metrics: '\[3\]'"):
        list(read_metrics(path))
