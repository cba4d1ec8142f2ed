"""The training loop learns, tells the truth, and gives the same numbers in every layout."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipert.comm.local import run_ranks
from pipert.comm.mesh import Mesh
from pipert.config import Config, parse_config
from pipert.errors import ConfigError, DataError
from pipert.report.metrics import read_metrics
from pipert.report.summary import Summary
from pipert.trainer import train

MODEL = {"layers": 4, "hidden": 16, "heads": 2, "sequence": 16, "vocabulary": 256, "dropout": 0.1}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty files of text that is easy to predict, but not by counting letters."""
    folder = tmp_path_factory.mktemp("corpus") / "text"
    folder.mkdir()
    for index in range(20):
        (folder / f"{index:02}.txt").write_text("abcdefghijklmnopqrstuvwxyz" * 20 + f"\n{index}\n")
    return folder


def configured(text: Path, **parallel: Any) -> Config:
    settings = {
        "model": MODEL,
        "data": {"text": [str(text)], "folder": str(text.parent / "tokens"), "heldout": 0.2, "global_batch": 8},
        "optimizer": {"lr": 0.01, "clip": 0.5},
        "schedule": {"warmup": 4},
        "parallel": {"micro_batch": 2, **parallel},
        "run": {"steps": 6, "eval_every": 3, "eval_samples": 8, "seed": 3, "timeline_every": 2},
    }
    settings["run"]["output"] = str(text.parent / "-".join(["run", *(f"{k}{v}" for k, v in parallel.items())]))
    return parse_config(settings)


def run(config: Config, console: Console | None = None) -> list[Summary]:
    layout = config.parallel
    silent = Console(file=io.StringIO())

    def rank(_: object) -> Summary:
        return train(config, Mesh.local(pp=layout.pp, dp=layout.dp, tp=layout.tp), console or silent)

    return run_ranks(layout.world, rank, deadline=60)


def logged(config: Config, event: str) -> list[dict[str, Any]]:
    return [record for record in read_metrics(Path(config.run.output) / "metrics.jsonl") if record["event"] == event]


LAYOUTS: list[dict[str, Any]] = [
    {"pp": 2},
    {"dp": 2},
    {"pp": 2, "dp": 2, "recompute": "block"},
    {"pp": 2, "chunks": 2, "schedule": "interleaved"},
    {"pp": 4, "schedule": "gpipe", "micro_batch": 1},
    {"dp": 4},
    {"pp": 2, "schedule": "auto", "in_flight": 3},
    {"pp": 2, "schedule": "gpipe", "recompute": "selective", "offload": 1},
    {"pp": 2, "tp": 2},
    {"dp": 2, "tp": 2, "sequence_parallel": True},
]


@pytest.fixture(scope="module")
def expected(text: Path) -> dict[str, list[dict[str, Any]]]:
    """What one process logs."""
    alone = configured(text)
    run(alone)
    return {event: logged(alone, event) for event in ("step", "evaluation")}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_losses_norms_and_rates_are_those_of_one_process_in_every_layout(
    text: Path, expected: dict[str, list[dict[str, Any]]], layout: dict[str, Any]
) -> None:
    other = configured(text, **layout)
    summaries = run(other)
    for mine, theirs in zip(logged(other, "step"), expected["step"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert (mine["lr"], mine["updates"], mine["samples"]) == (theirs["lr"], theirs["updates"], theirs["samples"])
    for mine, theirs in zip(logged(other, "evaluation"), expected["evaluation"], strict=True):
        assert mine["step"] == theirs["step"]
        assert mine["heldout_loss"] == pytest.approx(theirs["heldout_loss"], rel=1e-5)
    assert len({(summary.before, summary.after, summary.unigram) for summary in summaries}) == 1


def test_it_learns_what_counting_cannot_and_says_so(text: Path) -> None:
    config = configured(text, pp=2)
    config = parse_config({**_plain(config), "run": {**_plain(config)["run"], "steps": 60, "eval_every": 30}})
    out = io.StringIO()
    first, second = run(config, Console(file=out, width=200))
    assert first.after < first.unigram < first.before
    assert first.after < 0.6 * first.before
    assert (first.steps, first.updates, first.tokens) == (60, 60, 60 * 8 * 16)
    assert 0 < first.utilisation < 1.5 and 0 < first.bubble < 1 and 0 < first.predicted_bubble < 1
    assert [path.name for path in first.files] == [
        "metrics.jsonl",
        "pipeline.svg",
        "pipeline.png",
        "pipeline.trace.json",
    ]
    assert second.files == ()
    shown = out.getvalue()
    for part in ("stage  first block", "step 60/60", f"held-out loss {first.after:.3f}", f"wrote {first.files[1]}"):
        assert part in shown
    assert shown.count("parameters, tokenizer bytes") == 1  # one log, not one a rank
    (end,) = logged(config, "end")
    assert end["after"] == first.after
    names = {(event["pid"], event["name"]) for event in json.loads(first.files[3].read_text())["traceEvents"]}
    assert {(process, action) for process in (0, 1) for action in ("0F0", "0B3", "1F2", "1B3")} <= names


def _plain(config: Config) -> dict[str, Any]:
    sections = {
        name: getattr(config, name).model_dump() for name in ("data", "optimizer", "schedule", "parallel", "run")
    }
    return {"model": MODEL, **sections}


def test_metrics_have_the_figures_of_every_step(text: Path) -> None:
    config = configured(text, pp=2)
    run(config)
    steps = logged(config, "step")
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert [record["samples"] for record in steps] == [8, 16, 24, 32, 40, 48]
    assert [record["lr"] for record in steps[:5]] == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])
    assert [record["step"] for record in steps if "bubble" in record] == [1, 2, 4, 6]
    assert all(record["tokens_per_second"] > 0 and record["utilisation"] > 0 for record in steps)
    assert [record["step"] for record in logged(config, "evaluation")] == [0, 3, 6]
    (start,) = logged(config, "start")
    assert start["parameters"] == config.model.parameters


def test_a_mesh_that_is_not_the_configured_one_is_refused(text: Path) -> None:
    config = configured(text, pp=2)
    with pytest.raises(ConfigError, match=r"parallel\.pp is 2 but the mesh has pp 1; make them equal"):
        train(config, Mesh.local())


def test_text_that_cannot_be_used_is_refused_on_every_rank(text: Path) -> None:
    config = configured(text, pp=2)
    nowhere = parse_config({**_plain(config), "data": {**_plain(config)["data"], "text": ["nowhere"]}})
    with pytest.raises(DataError, match="no file or folder 'nowhere'"):
        run(nowhere)
    long = parse_config({**_plain(config), "model": {**MODEL, "sequence": 4096}})
    with pytest.raises(DataError, match=r"held-out tokens make 0 samples of 4096.*hold out more"):
        run(long)


@pytest.mark.parametrize("key", ["run.output", "data.folder"])
def test_a_folder_that_cannot_be_written_is_refused_on_every_rank_before_the_work(text: Path, key: str) -> None:
    file = text.parent / "file"
    file.write_text("in the way")
    config = configured(text, pp=2)
    if key == "run.output":
        config = replace(config, run=config.run.model_copy(update={"output": str(file / "run")}))
    else:
        config = replace(config, data=config.data.model_copy(update={"folder": str(file / "tokens")}))

    def rank(transport: Any) -> str:
        with pytest.raises(
            ConfigError, match=f"{key} .*/file/.* cannot be written to .*; name a folder that can"
        ) as caught:
            train(config, Mesh.local(pp=2), Console(file=io.StringIO()))
        return str(caught.value)

    assert len(set(run_ranks(2, rank))) == 1


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp64"])
def test_every_precision_learns_and_counts_its_updates(text: Path, precision: Any) -> None:
    config = configured(text, pp=2)
    changes = {"precision": precision, "output": f"{config.run.output}-{precision}"}
    config = replace(config, run=config.run.model_copy(update=changes))
    summary, *_ = run(config)
    assert summary.after < summary.before - 0.05
    steps = logged(config, "step")
    assert summary.updates == steps[-1]["updates"] == sum(math.isfinite(record["grad_norm"]) for record in steps)
    assert [record["lr"] for record in steps][:2] == pytest.approx([0.0025, 0.005])
