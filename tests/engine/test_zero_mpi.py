"""ZeRO on real MPI ranks."""

from __future__ import annotations

import pytest

from tests.mpi_harness import run_mpi

pytestmark = pytest.mark.mpi


def test_every_stage_over_mpi_gives_the_numbers_of_one_process() -> None:
    script = """
    import copy
    import torch
    torch.set_num_threads(1)
    import pipert
    from pipert.comm.mesh import Mesh
    from tests.engine.world import *

    model = gpt(layers=4, tied=True)
    steps = [[tokens(4, seed=10 * s + r) for r in range(2)] for s in range(2)]
    plain = run_plain(model, token_loss, [[parts(b, 2) for b in step] for step in steps], optimizer=ADAMW)
    mesh = Mesh.from_mpi(pp=2, dp=2)
    for zero, early, schedule, chunks in [
        (0, True, "1f1b", 1), (1, True, "interleaved", 2), (2, False, "zb-h1", 1), (3, True, "interleaved", 2)
    ]:
        pipe = pipert.Pipeline(copy.deepcopy(model), token_loss, mesh, schedule, 2, chunks=chunks)
        optim = pipert.ZeroAdamW(pipe, lr=0.01, zero=zero, early=early)
        outcome = Outcome()
        for number, step in enumerate(steps):
            optim.zero_grad()
            outcome.results.append(pipe.step(step[mesh.dp_rank]))
            outcome.norms.append(pipe.grad_norm())
            optim.step()
        outcome.gradients = optim.gradients()
        with optim.gathered():
            outcome.weights = {n: p.detach().clone() for n, p in pipe.named_parameters()}
        own = Outcome(plain.results, norms=plain.norms)
        own.gradients = {n: plain.gradients[n] for n in outcome.gradients}
        own.weights = {n: plain.weights[n] for n in outcome.weights}
        assert_same(outcome, own)
    print("rank", mesh.rank, "is well")
    mesh.close()
    """
    result = run_mpi(4, script, timeout=200, deadline=60)
    assert result.returncode == 0, result.text
    assert result.stdout.count("is well") == 4, result.text
