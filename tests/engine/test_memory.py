"""Activations live from their forward to their backward, and no longer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from pipert.comm.local import run_ranks
from pipert.comm.mesh import Mesh
from pipert.engine.pipeline import Pipeline
from tests.engine.world import vectors


class Watch:
    """Counts pieces of memory of one rank that are alive."""

    def __init__(self) -> None:
        self.alive: list[StorageWeakRef] = []
        self.peak = 0

    def add(self, tensor: torch.Tensor) -> None:
        self.alive = [ref for ref in self.alive if not ref.expired()] + [StorageWeakRef(tensor.untyped_storage())]
        self.peak = max(self.peak, len(self.alive))

    @property
    def left(self) -> int:
        return sum(not ref.expired() for ref in self.alive)


class Watched(nn.Module):
    """A block whose activation (kept by autograd) or output is watched."""

    def __init__(self, watch: Watch, what: str) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.watch, self.what = watch, what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        activation = torch.tanh(self.linear(x))
        output = activation + 1
        self.watch.add(activation if self.what == "activation" else output)
        return output


@pytest.mark.parametrize(
    ("schedule", "microbatches", "peaks"),
    [
        ("1f1b", 8, [4, 3, 2, 1]),
        ("1f1b", 32, [4, 3, 2, 1]),
        ("gpipe", 8, [8, 8, 8, 8]),
        ("1f1b", 2, [2, 2, 2, 1]),
    ],
)
def test_as_many_microbatches_are_live_as_the_schedule_says(schedule: str, microbatches: int, peaks: list[int]) -> None:
    watches = [Watch() for _ in range(4)]

    def rank(transport: Any) -> tuple[int, int]:
        model = nn.Sequential(*(Watched(watches[i], "activation") for i in range(4)))
        pipe = Pipeline(model.double(), F.mse_loss, Mesh.local(pp=4), schedule=schedule, microbatches=microbatches)
        pipe.step(vectors(microbatches))
        pipe.step(vectors(microbatches))
        watch = watches[transport.rank]
        assert pipe.timeline().peaks == tuple(peaks)
        return watch.peak, watch.left

    assert run_ranks(4, rank) == [(peak, 0) for peak in peaks]


def test_an_output_is_free_once_it_is_sent() -> None:
    watches = [Watch() for _ in range(2)]

    def rank(transport: Any) -> int:
        model = nn.Sequential(*(Watched(watches[i], "output") for i in range(2)))
        pipe = Pipeline(model.double(), F.mse_loss, Mesh.local(pp=2), schedule="gpipe", microbatches=8)
        pipe.step(vectors(8))
        return watches[transport.rank].left

    assert run_ranks(2, rank) == [0, 0]


@pytest.mark.parametrize("recompute", ["block", "full"])
def test_recompute_keeps_no_activations_inside_blocks(recompute: Any) -> None:
    watches = [Watch() for _ in range(2)]

    def rank(transport: Any) -> int:
        model = nn.Sequential(*(Watched(watches[i], "activation") for i in range(2)))
        pipe = Pipeline(
            model.double(), F.mse_loss, Mesh.local(pp=2), schedule="gpipe", microbatches=4, recompute=recompute
        )
        pipe.step(vectors(4))
        return watches[transport.rank].peak

    assert max(run_ranks(2, rank)) <= 2  # the one being computed, and its second run
