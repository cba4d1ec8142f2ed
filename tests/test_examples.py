"""The examples run as their first lines say, on real MPI ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pipert.report.metrics import read_metrics
from tests.mpi_harness import MPIEXEC, ROOT, run_mpi

EXAMPLES = ROOT / "examples"
TINY = "examples/configs/tiny.toml"
LAUNCHERS = {
    "pipert launch": (sys.executable, "-m", "pipert", "launch", "-n", "4"),
    "mpiexec": (MPIEXEC, "-n", "4", sys.executable),
}


@pytest.mark.mpi
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_embedding_in_a_trainer_learns_and_has_one_log(launcher: str) -> None:
    script = EXAMPLES / "embed_in_your_trainer.py"
    result = run_mpi(4, script, launcher=LAUNCHERS[launcher], timeout=120, check=True)
    lines = [line for line in result.stdout.splitlines() if line.startswith("step ")]
    losses = [float(line.rpartition(" ")[2]) for line in lines]
    assert len(losses) == 6, result.text
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.mpi
def test_training_a_gpt_ends_with_a_summary_and_pictures(tmp_path: Path) -> None:
    settings = ["run.steps=8", "run.eval_every=4", "run.eval_samples=8", "schedule.warmup=2", "model.hidden=32"]
    settings += ["model.sequence=32", f"run.output={tmp_path}/out", f"data.folder={tmp_path}/tokens"]
    result = run_mpi(
        4, EXAMPLES / "train_gpt.py", [TINY, *settings], launcher=LAUNCHERS["pipert launch"], timeout=150, check=True
    )
    assert "held-out loss" in result.stdout and result.stdout.count("wrote ") == 4, result.text
    for name in ("metrics.jsonl", "pipeline.svg", "pipeline.png", "pipeline.trace.json"):
        assert (tmp_path / "out" / name).stat().st_size > 100
    end = [record for record in read_metrics(tmp_path / "out" / "metrics.jsonl") if record["event"] == "end"]
    assert len(end) == 1 and end[0]["after"] < end[0]["before"]


@pytest.mark.mpi
def test_a_wrong_setting_ends_the_job_with_its_message_before_any_training() -> None:
    result = run_mpi(4, EXAMPLES / "train_gpt.py", [TINY, "paralel.pp=4"], timeout=60)
    assert result.returncode != 0
    assert result.text.count("paralel: unknown section; did you mean parallel?") == 1, result.text  # not once a rank
    assert "step" not in result.stdout


@pytest.mark.mpi
def test_another_number_of_ranks_is_refused_with_the_sum() -> None:
    result = run_mpi(2, EXAMPLES / "train_gpt.py", [TINY], timeout=60)
    assert result.returncode != 0
    assert "pp*tp*dp = 4 but 2 ranks" in result.text
