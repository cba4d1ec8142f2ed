"""When something fails on one rank, all ranks end, and everybody knows the first cause."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipert.comm.errors import HangError, JobAborted
from pipert.comm.faults import Faults
from pipert.comm.local import run_ranks
from pipert.comm.mesh import Mesh
from pipert.engine.pipeline import Pipeline
from pipert.errors import BoundaryError, ConfigError
from tests.engine.world import Residual, assert_same, parts, run_pipeline, run_plain, tower, vectors


class Bomb(nn.Module):
    """Raises in its nth forward, or in the backward of its nth forward."""

    def __init__(self, nth: int, error: BaseException, backward: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.nth, self.error, self.backward, self.count = nth, error, backward, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.count == self.nth:
            if not self.backward:
                raise self.error
            y.register_hook(self.explode)
        self.count += 1
        return y

    def explode(self, gradient: torch.Tensor) -> None:
        raise self.error


def blocks(bomb: nn.Module, place: int = 2) -> nn.Sequential:
    rows: list[nn.Module] = [Residual(6) for _ in range(4)]
    rows[place] = bomb
    return nn.Sequential(*rows).double()


def outcomes(model: nn.Module, source: Any = None, loss: Any = F.mse_loss, **options: Any) -> list[Any]:
    def rank(transport: Any) -> Any:
        pipe = Pipeline(copy.deepcopy(model), loss, Mesh.local(pp=4), microbatches=4)
        return pipe.step(source() if source else vectors(8))

    return run_ranks(4, rank, return_exceptions=True, **options)


class Odd(Exception):
    """An exception of the user's own."""


@pytest.mark.parametrize("error", [Odd("bang"), KeyboardInterrupt(), SystemExit(3)], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(("backward", "action"), [(False, "2F3"), (True, "2B3")])
def test_an_exception_keeps_its_type_and_says_where(error: BaseException, backward: bool, action: str) -> None:
    model = blocks(Bomb(3, error, backward))
    found = outcomes(model)
    assert type(found[2]) is type(error)
    assert f"rank 2, stage 2, micro-batch 3, action {action}" in found[2].__notes__
    for rank in (0, 1, 3):
        assert isinstance(found[rank], JobAborted)
        assert f"action {action}" in str(found[rank])
        assert type(error).__name__ in str(found[rank])


def test_an_exception_in_the_loss_names_the_last_stage() -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise Odd("no loss")

    found = outcomes(blocks(Residual(6)), loss=loss)
    assert isinstance(found[3], Odd)
    assert "rank 3, stage 3, micro-batch 0, action 3F0" in found[3].__notes__
    assert all(isinstance(found[rank], JobAborted) for rank in (0, 1, 2))


def test_an_exception_in_the_data_iterator_ends_all_ranks() -> None:
    def data() -> Iterator[Any]:
        raise Odd("disk on fire")
        yield

    found = outcomes(blocks(Residual(6)), source=data)
    assert any(isinstance(error, Odd) for error in found)
    assert all(isinstance(error, (Odd, JobAborted)) for error in found)
    assert all("disk on fire" in str(error) for error in found)


def test_a_pipeline_that_failed_says_so_when_used_again() -> None:
    def rank(transport: Any) -> None:
        model = blocks(Bomb(0, Odd("once")))
        pipe = Pipeline(model, F.mse_loss, Mesh.local(pp=4), microbatches=2)
        with pytest.raises((Odd, JobAborted)):
            pipe.step(vectors(4))
        with pytest.raises(ConfigError, match="an earlier step of this pipeline failed"):
            pipe.step(vectors(4))

    run_ranks(4, rank, leftovers="ignore", return_exceptions=True)


def test_a_lost_message_is_a_hang_that_names_the_action_that_waits() -> None:
    def rank(transport: Any) -> Any:
        pipe = Pipeline(copy.deepcopy(blocks(Residual(6))), F.mse_loss, Mesh.local(pp=4), microbatches=2)
        return pipe.step(vectors(4))

    with pytest.raises(HangError, match=r"2RECV_F1|2RECV_META1"):
        run_ranks(4, rank, faults=Faults(drop=((1, 2, 2),)), deadline=5.0)


class InPlaceInput(nn.Module):
    """Changes its input in place, so it cannot be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.add_(1))


@pytest.mark.parametrize(("recompute", "words"), [("block", "block 2 changes its input"), ("full", "stage 1 changes")])
def test_a_block_that_changes_its_input_is_not_recomputed_wrongly(recompute: Any, words: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), Residual(6), InPlaceInput(), Residual(6)).double()
    with pytest.raises(BoundaryError, match=f'{words}.* use recompute="none"'):
        run_pipeline(model, F.mse_loss, [[vectors(4)]], 2, cuts=[2, 2], microbatches=2, recompute=recompute)


@pytest.mark.parametrize("seed", range(20))
def test_random_sleeps_before_every_action_change_nothing(seed: int) -> None:
    model, batch = tower(6), vectors(4)
    schedule, chunks = [("1f1b", 1), ("gpipe", 1), ("interleaved", 2)][seed % 3]
    mine = run_pipeline(
        model,
        F.mse_loss,
        [[batch]],
        3,
        schedule=schedule,
        chunks=chunks,
        microbatches=2 + seed % 3,
        transport={"faults": Faults(seed=seed, stall=0.05 if seed < 3 else 0.01)},
    )
    assert_same(mine, run_plain(model, F.mse_loss, [[parts(batch, 2 + seed % 3)]]), 0)
