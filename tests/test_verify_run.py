"""`pipert verify-run`: layouts train to the numbers of one process, and a fault is seen."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pipert import Mesh
from pipert.comm.local import run_ranks
from pipert.comm.transport import Transport
from pipert.config import Config, load_config
from pipert.engine.collect import collect
from pipert.errors import ConfigError
from pipert.recipe import Updater
from pipert.verify_run import Comparison, Difference, verify_run
from tests.mpi_harness import ROOT, run_mpi

TINY = ROOT / "examples" / "configs" / "tiny.toml"
SMALL = ["model.layers=4", "model.hidden=32", "model.heads=4", "model.sequence=16", "data.global_batch=8"]
SMALL += ["parallel.micro_batch=1", "run.steps=3", "schedule.warmup=0"]

#: Keys of the section `parallel`, and others; together they use everything that a configuration can lay out.
LAYOUTS: list[list[str]] = [
    ["pp=1", "dp=1"],
    ["pp=4", "dp=1", "schedule=gpipe"],
    ["pp=2", "dp=2", "chunks=2", "schedule=interleaved", "recompute=block"],
    ["pp=2", "dp=1", "schedule=zb-v", "recompute=full"],
    ["pp=3", "dp=1", "vocabulary=spread"],
    ["pp=1", "dp=2", "tp=2", "recompute=selective"],
    ["pp=2", "dp=1", "tp=4", "sequence_parallel=true"],
    ["pp=2", "dp=2", "tp=2", "sequence_parallel=true", "schedule=zb-h1", "zero=1", "optimizer.early=true"],
    ["pp=1", "dp=4", "zero=2"],
    ["pp=2", "dp=2", "chunks=2", "schedule=interleaved", "zero=3", "recompute=block", "model.tied=false"],
    ["pp=4", "dp=1", "vocabulary=spread"],
    ["pp=2", "dp=2", "tp=2", "sequence_parallel=true"],
]


def configured(folder: Path, *settings: str) -> Config:
    places = [f"data.folder={folder}/data", f"run.output={folder}/run", f"data.text=['{ROOT}/pipert']"]
    return load_config(TINY, [*SMALL, *places, *settings])


def compared(config: Config, dtype: torch.dtype | None = torch.float64, steps: int = 2) -> Comparison:
    def rank(_: Transport) -> Comparison:
        layout = config.parallel
        return verify_run(config, Mesh.local(pp=layout.pp, dp=layout.dp, tp=layout.tp), steps, dtype)

    first, *others = run_ranks(config.parallel.world, rank)
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
def test_layouts_train_to_the_numbers_of_one_process(layout: list[str], tmp_path: Path) -> None:
    settings = [setting if "." in setting else f"parallel.{setting}" for setting in layout]
    comparison = compared(configured(tmp_path, "model.dropout=0.1", *settings))
    assert comparison.ok, comparison
    assert [(d.step, d.what) for d in comparison.differences] == [
        (step, what) for step in range(2) for what in ("loss", "norm", "gradient", "weight")
    ]


def test_pipelines_alone_change_no_bit(tmp_path: Path) -> None:
    settings = ["parallel.pp=4", "parallel.dp=1", "model.tied=false", "model.dropout=0.1"]
    comparison = compared(configured(tmp_path, *settings), dtype=None)
    assert all(difference.absolute == 0.0 for difference in comparison.differences), comparison


def test_a_layout_with_another_update_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update = Updater.update

    def twice(self: Any) -> Any:
        for parameter in self._pipe.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad * (1 + 1e-6)
        return update(self)

    monkeypatch.setattr(Updater, "update", twice)
    comparison = compared(configured(tmp_path, "optimizer.clip=0.0", "optimizer.eps=1e-3"))
    assert not comparison.ok
    assert comparison.worst.what in ("weight", "gradient", "norm", "loss")
    assert next(d for d in comparison.differences if d.relative > 1e-10).what == "weight"


def test_nan_is_never_rounding() -> None:
    good, bad = Difference(0, "loss", "", 0.0, 0.0), Difference(0, "norm", "", math.nan, math.nan)
    comparison = Comparison("pp=1", 1e-5, (good, bad))
    assert not comparison.ok and comparison.worst == bad
    assert json.loads(comparison.to_json())["ok"] is False


def test_no_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="steps = 0 must be at least 1"):
        verify_run(configured(tmp_path, "parallel.pp=1", "parallel.dp=1"), Mesh.local(), 0)


def test_tensors_of_all_ranks_are_collected_by_name() -> None:
    def rank(_: Transport) -> Any:
        mesh = Mesh.local(pp=3)
        mine = {"everybody's": torch.full((2, mesh.rank), float(mesh.rank)), f"{mesh.rank}'s": torch.ones(())}
        return collect(mine, mesh.world, root=1)

    nothing, collected, _ = run_ranks(3, rank)
    assert nothing == {} and set(collected) == {"everybody's", "0's", "1's", "2's"}
    assert [collected["everybody's"][rank].shape for rank in range(3)] == [(2, 0), (2, 1), (2, 2)]


@pytest.mark.mpi
def test_the_command_starts_its_ranks_and_prints_a_verdict(tmp_path: Path) -> None:
    options = ["verify-run", "--steps", "1", "--json", str(TINY), *SMALL, f"data.folder={tmp_path}/data"]
    options += [f"run.output={tmp_path}/run", f"data.text=['{ROOT}/pipert']", "parallel.pp=2", "parallel.dp=1"]
    result = run_mpi(1, "from pipert.cli import main; main()", options, launcher=[sys.executable])
    assert result.returncode == 0, result.text
    assert json.loads(result.stdout.splitlines()[-1])["ok"] is True
