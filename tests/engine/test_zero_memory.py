"""Bytes that ZeRO keeps and moves are those of its formulas."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pipert
from pipert.comm.local import run_ranks
from pipert.comm.mesh import Mesh
from pipert.engine.pipeline import Pipeline
from pipert.optim.memory import Memory, zero_memory
from pipert.optim.precision import NAMED
from tests.engine.world import gpt, token_loss, tokens

PARTS = ("parameters", "gradients", "moments", "masters")


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("dp", [2, 4])
def test_memory_of_every_rank_is_that_of_the_formula(zero: int, precision: str, dp: int) -> None:
    model = gpt(layers=4, dtype=NAMED[precision].parameters, hidden=64)
    copies = [copy.deepcopy(model) for _ in range(dp)]

    def rank(transport: Any) -> tuple[Memory, Memory, int]:
        pipe = Pipeline(
            copies[transport.rank], token_loss, Mesh.local(dp=dp), "interleaved", 2, chunks=4, precision=precision
        )
        optim = pipert.ZeroAdamW(pipe, zero=zero)
        count = sum(parameter.numel() for parameter in pipe.parameters())
        for _ in range(2):
            optim.zero_grad()
            pipe.step(tokens(4))
            optim.step()
        return pipe.memory(), zero_memory(count, zero=zero, replicas=dp, precision=NAMED[precision]), count

    for counted, formula, count in run_ranks(dp, rank):
        for part in PARTS:
            assert getattr(counted, part) == pytest.approx(getattr(formula, part), rel=0.03), (part, counted, formula)
        held = NAMED[precision].state_bytes() * count
        assert (formula.total == held) if not zero else (formula.total < held)


@pytest.mark.parametrize(("zero", "moments"), [(0, 1), (3, 1)])
def test_other_optimizers_and_frozen_weights_are_counted(zero: int, moments: int) -> None:
    copies = [nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(2)]
    for model in copies:
        model[0].requires_grad_(False)

    def rank(transport: Any) -> None:
        pipe = Pipeline(copies[transport.rank], F.mse_loss, Mesh.local(dp=2), microbatches=1)
        optim = pipert.ZeroOptimizer(pipe, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), zero=zero)
        pipe.step((torch.randn(2, 64), torch.randn(2, 64)))
        optim.step()
        each = 64 * 65
        formula = zero_memory(each, zero=zero, replicas=2, frozen=each, moments=moments)
        for part in PARTS:
            assert getattr(optim.memory(), part) == pytest.approx(getattr(formula, part), rel=0.03), part

    run_ranks(2, rank)


@pytest.mark.parametrize(("zero", "early"), [(0, False), (1, False), (2, False), (3, False), (1, True), (3, True)])
def test_bytes_moved_between_replicas_are_those_of_the_formula(zero: int, early: bool) -> None:
    """With Ψ bytes of weights and gradients each, and M micro-batches, as this rank's (larger) tensors."""
    microbatches, chunks = 3, 4
    copies = [nn.Sequential(*(nn.Linear(32, 32) for _ in range(chunks))) for _ in range(2)]

    def rank(transport: Any) -> tuple[dict[str, int], int]:
        mesh = Mesh.local(dp=2)
        pipe = Pipeline(copies[transport.rank], F.mse_loss, mesh, "interleaved", microbatches, chunks=chunks)
        optim = pipert.ZeroAdamW(pipe, zero=zero, early=early)
        batch = torch.randn(3, 32), torch.randn(3, 32)
        for _ in range(2):
            before = mesh.dp_group.counters.bytes.copy()  # type: ignore[attr-defined]
            pipe.step(batch)
            optim.step()
            optim.zero_grad()
        moved = mesh.dp_group.counters.bytes - before  # type: ignore[attr-defined]
        gathers = sum(action.kind.name == "GATHER" for _, action, _, _ in pipe.timeline())
        return dict(moved), gathers

    size = chunks * 32 * 33 * 4
    flags = chunks * 2 * 4  # which parameters have a gradient, once a step
    for moved, gathers in run_ranks(2, rank):
        if zero == 0:
            assert moved == {"allreduce": size + flags}
        elif zero < 3:
            assert moved == {
                "reduce_scatter": size * (microbatches if zero == 2 else 1),
                "allreduce": flags,
                "allgather": size,
            }
        else:
            fetched = gathers * size // chunks
            assert moved == {"reduce_scatter": size * microbatches, "allreduce": flags, "allgather": fetched}


def test_more_stages_a_rank_hold_less_at_a_time_at_stage_3() -> None:
    """The most bytes of whole weights that any computation sees, by the number of chunks."""
    most = {}
    for chunks in (1, 2, 4, 8):
        copies = [nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(8))) for _ in range(2)]

        def rank(transport: Any, chunks: int = chunks, copies: Any = copies) -> int:
            schedule = "1f1b" if chunks == 1 else "interleaved"
            pipe = Pipeline(copies[transport.rank], F.mse_loss, Mesh.local(dp=2), schedule, 2, chunks=chunks)
            optim = pipert.ZeroAdamW(pipe, zero=3)
            seen = [0]

            def look(*_: object) -> None:
                seen[0] = max(seen[0], sum(bucket.flat.untyped_storage().nbytes() for bucket in optim.buckets))

            for module in pipe.modules.values():
                module.register_forward_hook(look)
            pipe.step((torch.randn(4, 32), torch.randn(4, 32)))
            optim.step()
            assert sum(bucket.flat.untyped_storage().nbytes() for bucket in optim.buckets) == 0
            return seen[0]

        most[chunks] = run_ranks(2, rank)[0]
    whole = 8 * 32 * 32 * 4
    assert most == {1: whole, 2: whole, 4: whole // 2, 8: whole // 4}
