"""Bugs that pipert had, each told in a few words, and the test that would have seen it."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F

from pipert.comm.local import run_ranks
from pipert.comm.mesh import Mesh
from pipert.engine.loss import default_count
from pipert.engine.pipeline import Pipeline
from pipert.errors import BatchError, ConfigError
from pipert.optim.adamw import ZeroAdamW
from pipert.report.log import RunLog
from pipert.report.metrics import read_metrics
from tests.engine.world import ADAMW, Residual, assert_same, parts, run_pipeline, run_plain, vectors
from tests.mpi_harness import run_mpi


class Auxiliary(nn.Module):
    """Hands on a second value, of a layer of its own, as a model with an auxiliary head does."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.auxiliary = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.main(x), self.auxiliary(x)


class Main(nn.Module):
    def forward(self, both: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return both[0]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_weight_decay_moved_weights_that_no_loss_depends_on(schedule: str) -> None:
    """A stage sent zeros back for an input that it never used. So the layer behind it had a gradient of zeros where one
    process has none, and AdamW, which passes over parameters without a gradient, decayed its weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Auxiliary(), Main(), nn.Linear(6, 6)).double()
    batch = vectors(4)
    mine = run_pipeline(
        model, F.mse_loss, [[batch]] * 2, 2, cuts=[2, 2], optimizer=ADAMW, microbatches=2, schedule=schedule
    )
    assert torch.equal(mine.weights["1.auxiliary.weight"], model.get_parameter("1.auxiliary.weight"))
    assert_same(mine, run_plain(model, F.mse_loss, [[parts(batch, 2)]] * 2, optimizer=ADAMW), 0)


def test_two_micro_batches_as_lists_were_read_as_one_pair() -> None:
    """A list of two is read as (inputs, targets), since torch's DataLoader returns lists. So [[x, y], [x, y]] trained
    on inputs (x, y) and targets (x, y), where three such lists were refused. Now two of two are refused as well."""

    def rank(_: object) -> None:
        pipe = Pipeline(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double(), F.mse_loss, Mesh.local(pp=2))
        with pytest.raises(BatchError, match="may be one pair"):
            pipe.step([list(vectors(4)), list(vectors(4))])
        assert pipe.step(list(vectors(4))).microbatches == 4  # what a DataLoader gives

    run_ranks(2, rank)


@pytest.mark.mpi
def test_a_rank_that_was_late_for_the_start_of_mpi_was_nowhere_named() -> None:
    """All that the others said at the deadline was "a rank has not come so far"."""
    script = """
        import os, time
        from pipert.comm.mpi import MpiTransport
        if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
            time.sleep(1000)
        MpiTransport.world()
        """
    result = run_mpi(3, script, timeout=90, deadline=6)
    assert result.returncode != 0
    words = r"MPI did not start in 6 s, the deadline: .*rank 1 \(process \d+\)[^;]* not come so far; py-spy dump --pid"
    assert re.search(words, result.stderr), result.text
    assert "more time is given by deadline= or PIPERT_DEADLINE (seconds)" in result.stderr


def test_every_rank_printed_that_the_configuration_is_wrong() -> None:
    """On 64 ranks the one line that mattered was there 64 times. The exit code still is every rank's."""
    script = "from pipert.launch import end_before_mpi; end_before_mpi('ConfigError: steps')"
    for number in range(2):
        result = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PMI_RANK": str(number)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (result.returncode, result.stderr.strip()) == (1, "" if number else "ConfigError: steps")


def test_a_second_run_in_the_same_folder_wrote_over_the_first_ones_metrics(tmp_path: Path) -> None:
    """A training of hours was lost to trying the same command again. Both are kept now, and the second says where."""
    for run in range(2):
        out = io.StringIO()
        with RunLog(True, Console(file=out, width=300), tmp_path / "metrics.jsonl", steps=1) as log:
            log.event("start", {"run": run})
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == [{"event": "start", "run": 1}]
    assert list(read_metrics(tmp_path / "earlier-1" / "metrics.jsonl")) == [{"event": "start", "run": 0}]
    assert f"results of an earlier run are kept in {tmp_path}/earlier-1" in out.getvalue()


class Shift(nn.Module):
    """Its parameter's gradient is its input's gradient, in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift.view(2, 6)


@pytest.mark.parametrize(("schedule", "chunks", "pp"), [("1f1b", 1, 2), ("interleaved", 2, 1)])
def test_a_gradient_under_way_shared_its_memory_with_a_parameters_gradient(schedule: str, chunks: int, pp: int) -> None:
    """autograd gave ``x`` and ``shift`` one gradient tensor; the next micro-batch added to the parameter's in place,
    and the previous stage got the sum of two micro-batches for one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Shift(), nn.Tanh()).double()
    batch = vectors(8)
    mine = run_pipeline(model, F.mse_loss, [[batch]], pp, schedule=schedule, chunks=chunks, microbatches=4, cuts=[1, 2])
    assert_same(mine, run_plain(model, F.mse_loss, [[parts(batch, 4)]]), 0)


def test_class_weights_were_not_counted() -> None:
    """torch's weighted mean divides by the sum of the weights of the targets. Micro-batches were put together by their
    number of targets, so the loss depended on how the batch was cut."""
    loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 4.0]), ignore_index=0)
    assert default_count(loss_fn)(torch.tensor([0, 1, 1])) == 8.0
    assert default_count(nn.CrossEntropyLoss(weight=torch.tensor([0.5, 4.0])))(torch.tensor([0, 1, 1])) == 8.5


def test_a_rank_that_waited_for_data_was_said_to_be_in_the_last_steps_action() -> None:
    """A hang report told of ``0B7`` for minutes; the rank was in the user's own data loader."""

    def rank(_: object) -> list[str]:
        told: list[str] = []
        mesh = Mesh.local(pp=2)
        model = nn.Sequential(*(Residual(6) for _ in range(4))).double()
        pipe = Pipeline(model, F.mse_loss, mesh, microbatches=2)
        mesh.world.report = told.append  # type: ignore[assignment, method-assign]

        def data() -> Iterator[Any]:
            assert told[-1] == "pulling the batch of step 0"
            yield vectors(4)

        pipe.step(data())
        assert told[-1] == "the trainer's own code, after step 0"
        pipe.eval_step(vectors(4))
        return told[-2:]

    expected = ["pulling the batch of eval_step 1", "the trainer's own code, after eval_step 1"]
    assert run_ranks(2, rank) == [expected] * 2


def test_an_optimizer_updated_weights_that_nobody_used_any_more() -> None:
    """A second optimizer on another pipeline of the same model, or model.to(…), gave the parameters other memory. The
    first one went on updating its own buffer: its steps changed nothing, and nothing said so."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double()
    pipes = [Pipeline(model, F.mse_loss, Mesh.local(), microbatches=1) for _ in range(2)]
    first, second = map(ZeroAdamW, pipes)
    pipes[0].step(vectors(4))
    with pytest.raises(ConfigError, match=r"0.weight is no longer where its optimizer updates it"):
        first.step()
    second.step()
