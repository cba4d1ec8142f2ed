"""Activations that go to host memory and come back: less memory in between, and not a bit of difference."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipert.comm.local import run_ranks
from pipert.comm.mesh import Mesh
from pipert.engine.offload import Mover, Saved
from pipert.engine.pipeline import Pipeline
from pipert.errors import ConfigError
from pipert.optim.adamw import ZeroAdamW
from tests.engine.test_memory import Watch, Watched
from tests.engine.test_recompute import foreign
from tests.engine.world import assert_same, gpt, run_pipeline, token_loss, tokens, tower, vectors

LAYOUTS = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 1)]


@pytest.mark.parametrize(
    ("kind", "schedule", "chunks"),
    [*(("tower", *layout) for layout in LAYOUTS), ("ours", "1f1b", 1), ("ours", "zb-v", 1), ("foreign", "1f1b", 1)],
)
def test_numbers_are_bitwise_those_without_in_every_schedule(kind: str, schedule: str, chunks: int) -> None:
    model: nn.Module = {
        "ours": lambda: gpt(dropout=0.3, layers=6, sequence=8),
        "foreign": lambda: foreign(8),
        "tower": lambda: tower(8),
    }[kind]()
    loss: Any = token_loss if kind == "ours" else F.mse_loss
    batch = tokens(6, 8) if kind == "ours" else vectors(6)

    def run(**options: Any) -> Any:
        return run_pipeline(
            model, loss, [[batch]] * 2, 4, schedule=schedule, chunks=chunks, microbatches=6, seed=5, **options
        )

    assert_same(run(offload=1), run(), 0)


@pytest.mark.parametrize("recompute", ["selective", "block", "full"])
def test_it_goes_together_with_recompute_and_half_precision(recompute: str) -> None:
    model, batch = gpt(torch.float32, dropout=0.3, layers=3, sequence=8), tokens(6, 8)
    options: dict[str, Any] = {"microbatches": 6, "precision": "bf16", "schedule": "gpipe"}
    plain = run_pipeline(model, token_loss, [[batch]], 2, **options)
    assert_same(run_pipeline(model, token_loss, [[batch]], 2, offload=1, recompute=recompute, **options), plain, 0)


@pytest.mark.parametrize(("schedule", "offload", "peaks"), [("gpipe", 2, [3, 3]), ("1f1b", {0: 1}, [2, 1])])
def test_as_many_activations_stay_as_asked(schedule: str, offload: Any, peaks: list[int]) -> None:
    watches = [Watch() for _ in range(2)]

    def rank(transport: Any) -> tuple[int, int]:
        model = nn.Sequential(*(Watched(watches[i], "activation") for i in range(2)))
        pipe = Pipeline(
            model.double(), F.mse_loss, Mesh.local(pp=2), schedule=schedule, microbatches=8, offload=offload
        )
        pipe.step(vectors(8))
        pipe.step(vectors(8))
        watch = watches[transport.rank]
        assert pipe.timeline().peaks == tuple(peaks)
        assert [stage.in_flight for stage in pipe.partition.stages] == peaks
        return watch.peak, watch.left

    assert run_ranks(2, rank) == [(peak, 0) for peak in peaks]


def test_what_saved_tensors_share_is_moved_once_and_parameters_are_not() -> None:
    weight, x = nn.Parameter(torch.randn(4, 4)), torch.randn(4, 4, requires_grad=True)
    saved = Saved(Mover(torch.device("cpu")), {weight.untyped_storage().data_ptr()})
    with saved.saving():
        y = (x * 2) @ weight
        loss = (y[:2].sigmoid() * y[2:]).sum() + (y.t() * y.expand(1, 4, 4)).sum()
    pieces = list(saved._pieces.values())
    assert sorted(piece.data.numel() for piece in pieces if piece.data is not None) == [32, 64, 64]  # sigmoid, x * 2, y
    saved.offload()
    assert all(piece.data is None and piece.host is not None for piece in pieces)
    saved.reload()
    loss.backward()
    got = weight.grad, x.grad
    weight.grad = x.grad = None
    y = (x * 2) @ weight
    ((y[:2].sigmoid() * y[2:]).sum() + (y.t() * y.expand(1, 4, 4)).sum()).backward()
    assert torch.equal(got[0], weight.grad)
    assert torch.equal(got[1], x.grad)


class InPlace(nn.Module):
    """Changes what its backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)).add_(1)


def test_what_is_changed_in_place_is_refused_as_autograd_does() -> None:
    pipe = Pipeline(
        nn.Sequential(InPlace()).double(), F.mse_loss, Mesh.local(), schedule="gpipe", microbatches=3, offload=1
    )
    with pytest.raises(RuntimeError, match="changed in place"):
        pipe.step(vectors(3))


@pytest.mark.parametrize("offload", [0, {0: 0}, {2: 1}, {0: 1.5}, True, "all"])
def test_what_cannot_be_kept_is_refused_on_every_rank(offload: Any) -> None:
    def rank(transport: Any) -> None:
        with pytest.raises(ConfigError, match="give how many micro-batches stay"):
            Pipeline(tower(4), F.mse_loss, Mesh.local(pp=2), offload=offload)

    run_ranks(2, rank)


def test_evaluation_and_frozen_stages_move_nothing() -> None:
    def rank(transport: Any) -> tuple[float, set[str]]:
        model = tower(8)
        for parameter in model[:4].parameters():
            parameter.requires_grad_(False)
        pipe = Pipeline(model, F.mse_loss, Mesh.local(pp=2), schedule="gpipe", microbatches=4, cuts=[4, 4], offload=1)
        loss = pipe.eval_step(vectors(4)).loss
        pipe.step(vectors(4))
        return loss, {str(action) for _, action, _, _ in pipe.timeline() if "LOAD" in str(action)}

    for _, moves in run_ranks(2, rank):
        assert moves == {f"1{kind}{m}" for kind in ("OFFLOAD", "RELOAD") for m in (1, 2, 3)}


@pytest.mark.parametrize("zero", [0, 3])
def test_weights_that_are_gathered_and_freed_meanwhile_make_no_difference(zero: int) -> None:
    model, batches = tower(6, dtype=torch.float32), [tuple(t.float() for t in vectors(6, seed=seed)) for seed in (1, 2)]

    def norms(**options: Any) -> list[list[float]]:
        copies = [copy.deepcopy(model) for _ in range(4)]

        def rank(transport: Any) -> list[float]:
            mesh = Mesh.local(pp=2, dp=2)
            pipe = Pipeline(copies[transport.rank], F.mse_loss, mesh, schedule="gpipe", microbatches=3, **options)
            optim, found = ZeroAdamW(pipe, lr=1e-2, zero=zero), []
            for _ in range(2):
                pipe.step(batches[mesh.dp_rank])
                found.append(pipe.grad_norm())
                optim.step()
                optim.zero_grad()
            return found

        return run_ranks(4, rank)

    plain = norms()
    assert norms(offload=1) == plain
    assert norms(offload=1, recompute="full") == plain
