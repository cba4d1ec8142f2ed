"""Recompute changes memory and time, never a bit of the numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipert.comm.local import run_ranks
from pipert.comm.mesh import Mesh
from pipert.engine.pipeline import Pipeline
from pipert.engine.recompute import per_stage
from pipert.errors import ConfigError
from tests.engine.test_memory import Watch
from tests.engine.world import assert_same, gpt, run_pipeline, seeded, token_loss, tokens, vectors

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 1)]


class Marked(nn.Module):
    """A layer of somebody else's, which draws from torch's global generator and counts its runs."""

    recompute_me = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: torch.Tensor, *, times: float = 1.0) -> torch.Tensor:
        self.runs += 1
        return F.dropout(torch.tanh(self.linear(x)), 0.3, self.training) * times


class Foreign(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.marked, self.last = nn.Linear(6, 6), Marked(), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.last(self.marked(F.dropout(self.first(x), 0.2), times=0.5)), 0.2)


def foreign(blocks: int) -> nn.Sequential:
    with seeded(0):
        return nn.Sequential(*(Foreign() for _ in range(blocks))).double()


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("kind", ["ours", "foreign"])
def test_every_mode_has_the_same_gradients_in_every_schedule_with_dropout_on(
    kind: str, schedule: str, chunks: int
) -> None:
    ours = kind == "ours"
    model: nn.Module = gpt(dropout=0.5, tied=False, layers=5, sequence=8) if ours else foreign(8)
    loss: Any = token_loss if ours else F.mse_loss
    batch = tokens(4, 8) if ours else vectors(4)

    def run(recompute: Any) -> Any:
        options = {"schedule": schedule, "chunks": chunks, "microbatches": 2, "recompute": recompute, "seed": 5}
        return run_pipeline(model, loss, [[batch]], 4, **options)

    plain = run("none")
    for recompute in ("selective", {0: "block", 1: "full", 2: "selective"}) if ours else ("selective", "block", "full"):
        assert_same(run(recompute), plain, 0)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_modes_agree_in_half_precision(precision: str) -> None:
    model, batch = gpt(torch.float32, dropout=0.2, layers=3, sequence=8), tokens(2, 8)
    runs = [
        run_pipeline(model, token_loss, [[batch]], 2, microbatches=2, recompute=recompute, precision=precision)
        for recompute in ("none", "selective", "block", "full")
    ]
    for run in runs[1:]:
        assert_same(run, runs[0], 0)


def test_a_marked_layer_moves_its_buffers_once() -> None:
    def rank(transport: Any) -> list[float]:
        pipe = Pipeline(foreign(2), F.mse_loss, Mesh.local(pp=2), microbatches=2, recompute="selective")
        pipe.step(vectors(4))
        pipe.eval_step(vectors(4))
        layers = [layer for module in pipe.modules.values() for layer in module.modules() if isinstance(layer, Marked)]
        assert all("forward" not in layer.__dict__ for layer in layers)
        return [float(layer.runs) for layer in layers]

    assert run_ranks(2, rank) == [[4.0], [4.0]]


class Core(nn.Module):
    """Keeps an activation inside a marked method, and one outside."""

    recompute_me = "core"

    def __init__(self, inside: Watch, outside: Watch) -> None:
        super().__init__()
        self.linear, self.inside, self.outside = nn.Linear(6, 6), inside, outside

    def core(self, x: torch.Tensor) -> torch.Tensor:
        activation = torch.tanh(x)
        self.inside.add(activation)
        return activation + 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.sigmoid(self.linear(x))
        self.outside.add(y)
        return torch.exp(self.core(y))


@pytest.mark.parametrize(("recompute", "inside", "outside"), [("none", 4, 4), ("selective", 1, 4), ("block", 1, 1)])
def test_selective_keeps_all_but_what_is_inside_marked_methods(recompute: Any, inside: int, outside: int) -> None:
    watches = [(Watch(), Watch()) for _ in range(2)]

    def rank(transport: Any) -> tuple[int, int]:
        model = nn.Sequential(*(Core(*watch) for watch in watches)).double()
        pipe = Pipeline(model, F.mse_loss, Mesh.local(pp=2), schedule="gpipe", microbatches=4, recompute=recompute)
        pipe.step(vectors(4))
        first, second = watches[transport.rank]
        assert (first.left, second.left) == (0, 0)
        return first.peak, second.peak

    for peaks in run_ranks(2, rank):
        assert peaks[0] in (inside, inside + 1)
        assert peaks[1] in (outside, outside + 1)


def test_the_attention_of_the_gpt_is_marked() -> None:
    model = gpt(layers=1)
    assert [name for name, layer in model.named_modules() if getattr(layer, "recompute_me", False)] == [
        "blocks.0.attention"
    ]


def test_modes_by_stage() -> None:
    assert per_stage("block", 3) == ("block",) * 3
    assert per_stage(["none", "full"], 2) == ("none", "full")
    assert per_stage({1: "selective"}, 3) == ("none", "selective", "none")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("some", "'some' is none of 'none', 'selective', 'block', 'full'"),
        (["none"], "for 2 stages: give one mode"),
        ({2: "full"}, r"names stage 2; the stages are 0 to 1"),
        ({0: "all"}, "'all' is none of"),
        (True, "give one mode"),
    ],
)
def test_what_is_no_mode_is_refused_on_every_rank(setting: Any, words: str) -> None:
    def rank(transport: Any) -> None:
        with pytest.raises(ConfigError, match=words):
            Pipeline(foreign(4), F.mse_loss, Mesh.local(pp=2), recompute=setting)

    run_ranks(2, rank)


def test_a_mark_that_names_no_method_is_refused() -> None:
    model = foreign(2)
    model[0].marked.recompute_me = "heart"

    with pytest.raises(ConfigError, match=r"0\.marked \(Marked\) says recompute_me = 'heart'"):
        Pipeline(model, F.mse_loss, Mesh.local(), recompute="selective")


def test_the_partition_counts_what_each_mode_keeps() -> None:
    def memory(recompute: Any) -> list[int]:
        def rank(transport: Any) -> list[int | None]:
            model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 600), nn.Linear(600, 6)) for _ in range(4))).double()
            options = {"schedule": "gpipe", "microbatches": 8, "cuts": [2, 2], "example": vectors(2)[0]}
            pipe = Pipeline(model, F.mse_loss, Mesh.local(pp=2), recompute=recompute, **options)
            return [stage.memory for stage in pipe.partition.stages]

        return run_ranks(2, rank)[0]

    none, block, full, mixed = map(memory, ("none", "block", "full", {1: "block"}))
    assert none[0] > block[0]
    assert none[0] > full[0]
    assert mixed == [none[0], block[1]]
