"""There is one log: the first rank writes, the others are silent."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from pipert.report.log import RunLog
from pipert.report.metrics import read_metrics


def test_the_first_rank_writes_and_the_others_do_not(tmp_path: Path) -> None:
    out = [io.StringIO() for _ in range(3)]
    for rank in range(3):
        path = tmp_path / str(rank) / "metrics.jsonl"
        with RunLog(rank == 0, Console(file=out[rank]), path, steps=1) as log:
            log.event("start", {"parameters": 3}, "hello")
            log.step(1, {"loss": 0.5}, {"loss": "0.50"})
            log.event("quiet", {})
        assert path.exists() is (rank == 0)
    assert list(read_metrics(tmp_path / "0" / "metrics.jsonl")) == [
        {"event": "start", "parameters": 3},
        {"event": "step", "step": 1, "loss": 0.5},
        {"event": "quiet"},
    ]
    assert out[0].getvalue().startswith("hello\nstep 1/1  loss 0.50")
    assert out[1].getvalue() == out[2].getvalue() == ""
