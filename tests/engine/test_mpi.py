"""The same on real MPI ranks: numbers, changing shapes with synchronous sends, failures."""

from __future__ import annotations

import pytest

from tests.mpi_harness import run_mpi

pytestmark = pytest.mark.mpi

COMMON = """
    import copy, random, sys, time
    import torch
    from torch.nn import functional as F
    torch.set_num_threads(1)
    import pipert
    from pipert.comm.mesh import Mesh
    from tests.engine.world import *

    def check(pipe, outcome, wanted, tolerance):
        outcome.gradients = {n: p.grad for n, p in pipe.named_parameters()}
        outcome.weights = {n: p.detach() for n, p in pipe.named_parameters()}
        for kind in ("gradients", "weights"):
            full = getattr(wanted, kind)
            setattr(wanted, kind, {n: full[n] for n in getattr(outcome, kind)})
        assert_same(outcome, wanted, tolerance)

    def train(model, loss, steps, mesh, optimizer, sleeps=None, **options):
        pipe = pipert.Pipeline(copy.deepcopy(model), loss, mesh, **options)
        if sleeps is not None:
            report = mesh.pp_group.report
            mesh.pp_group.report = lambda text: (time.sleep(sleeps.uniform(0, 0.05)), report(text))
        optim = optimizer(pipe.parameters())
        outcome = Outcome()
        for number, replicas in enumerate(steps):
            if number:
                optim.zero_grad()
            ends = mesh.pp_rank in (0, mesh.pp - 1)
            outcome.results.append(pipe.step(replicas[mesh.dp_rank] if ends else None))
            outcome.norms.append(pipe.grad_norm())
            optim.step()
        if sleeps is not None:
            mesh.pp_group.report = report
        return pipe, outcome
"""


def test_pipelines_and_replicas_over_mpi_give_the_numbers_of_one_process() -> None:
    script = (
        COMMON
        + """
    model = gpt(layers=6, tied=True)
    steps = [[tokens(4, seed=2 * s), tokens(3, length=12, seed=2 * s + 1)] for s in range(3)]
    for pp, dp, schedule, chunks, optimizer in [
        (4, 1, "1f1b", 1, ADAMW), (4, 1, "gpipe", 1, SGD), (2, 2, "interleaved", 2, ADAMW), (2, 2, "1f1b", 1, SGD)
    ]:
        mesh = Mesh.from_mpi(pp=pp, dp=dp)
        own = [step[:dp] for step in steps]
        pipe, outcome = train(model, token_loss, own, mesh, optimizer, schedule=schedule, chunks=chunks, microbatches=3)
        plain = run_plain(model, token_loss, [[parts(b, 3) for b in step] for step in own], optimizer=optimizer)
        check(pipe, outcome, plain, 1e-10)
        held_out = pipe.eval_step(tokens(5, seed=9), microbatches=2)
        timeline = pipe.timeline()
        assert timeline.num_ranks == pp and timeline.makespan > 0
        mesh.close()
    untied = gpt(layers=6, tied=False, dtype=torch.float32)
    mesh = Mesh.from_mpi(pp=4)
    pipe, outcome = train(untied, token_loss, [step[:1] for step in steps], mesh, SGD, microbatches=4)
    plain = run_plain(untied, token_loss, [[parts(step[0], 4)] for step in steps], optimizer=SGD)
    check(pipe, outcome, plain, 0)
    print("rank", mesh.rank, "is well")
    mesh.close()
    """
    )
    result = run_mpi(4, script, timeout=150, deadline=60)
    assert result.returncode == 0, result.text
    assert result.stdout.count("is well") == 4, result.text


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_backwards_in_two_halves_over_mpi_have_the_bits_of_one_process(schedule: str) -> None:
    script = (
        COMMON
        + f"""
    mesh = Mesh.from_mpi(pp=3)
    model = gpt(layers=6, tied=False)
    steps = [[tokens(5, length=10 + s, seed=s)] for s in range(3)]
    pipe, outcome = train(model, token_loss, steps, mesh, ADAMW, schedule={schedule!r}, microbatches=4)
    plain = [[parts(b, 4) for b in step] for step in steps]
    check(pipe, outcome, run_plain(model, token_loss, plain, optimizer=ADAMW), 0)
    print("rank", mesh.rank, "is well")
    mesh.close()
    """
    )
    result = run_mpi(3, script, timeout=150, deadline=60, env={"PIPERT_SYNCHRONOUS": "1"})
    assert result.returncode == 0, result.text
    assert result.stdout.count("is well") == 3, result.text


@pytest.mark.parametrize("pp", [4, 5])
def test_shapes_that_change_every_step_finish_under_synchronous_sends(pp: int) -> None:
    script = (
        COMMON
        + f"""
    mesh = Mesh.from_mpi(pp={pp})
    model = gpt(layers=5, sequence=20, tied=False)
    steps = [[[tokens(1 + (s + m) % 3, 7 + (3 * s + m) % 13, seed=s) for m in range(1 + s % 4)]] for s in range(10)]
    pipe, outcome = train(model, token_loss, steps, mesh, SGD)
    check(pipe, outcome, run_plain(model, token_loss, steps, optimizer=SGD), 0)
    print("rank", mesh.rank, "is well")
    mesh.close()
    """
    )
    result = run_mpi(pp, script, timeout=150, deadline=60, env={"PIPERT_SYNCHRONOUS": "1"})
    assert result.returncode == 0, result.text
    assert result.stdout.count("is well") == pp, result.text


def test_random_sleeps_before_every_action_over_mpi_change_nothing() -> None:
    script = (
        COMMON
        + """
    mesh = Mesh.from_mpi(pp=3)
    model = tower(6)
    for seed in range(20):
        sleeps = random.Random(f"{seed} {mesh.rank}")
        schedule, chunks = SCHEDULES[seed % 3]
        steps = [[[vectors(1 + seed % 3, seed=seed)] * 2]]
        pipe, outcome = train(model, F.mse_loss, steps, mesh, SGD, sleeps, schedule=schedule, chunks=chunks)
        check(pipe, outcome, run_plain(model, F.mse_loss, steps, optimizer=SGD), 0)
    print("rank", mesh.rank, "is well")
    mesh.close()
    """
    )
    result = run_mpi(3, script, timeout=150, deadline=60)
    assert result.returncode == 0, result.text
    assert result.stdout.count("is well") == 3, result.text


FAILURES = {
    "forward": ("raise RuntimeError('bang')", ["RuntimeError: bang", "rank 2, stage 2, micro-batch 3, action 2F3"]),
    "exit": ("sys.exit(3)", ["SystemExit", "rank 2, stage 2, micro-batch 3, action 2F3"]),
    "interrupt": ("raise KeyboardInterrupt", ["KeyboardInterrupt", "rank 2, stage 2, micro-batch 3, action 2F3"]),
    "kill": ("os.kill(os.getpid(), 9)", ["ignal 9"]),
    "hang": ("time.sleep(1000)", ["2F3"]),
}


@pytest.mark.parametrize("how", FAILURES)
def test_when_a_forward_fails_every_rank_is_gone_and_the_cause_is_printed(how: str) -> None:
    act, words = FAILURES[how]
    script = (
        COMMON
        + f"""
    import os
    def act():
        {act}
    mesh = Mesh.from_mpi(pp=4)
    rows = [Residual(6), Residual(6), Bomb(6, act), Residual(6)]
    pipe = pipert.Pipeline(torch.nn.Sequential(*rows).double(), F.mse_loss, mesh, microbatches=6)
    pipe.step(vectors(6))
    print("not reached")
    """
    )
    result = run_mpi(4, script, timeout=90, deadline=15)
    assert result.returncode != 0, result.text
    assert result.seconds < 60, result.text
    assert "not reached" not in result.stdout, result.text
    for word in words:
        assert word in result.stderr + result.stdout, result.text


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("data", ["ValueError: disk on fire"]),
        ("loss", ["ValueError: no loss", "rank 1, stage 1, micro-batch 0, action 1F0"]),
        ("import", ["No module named 'no_such_module'"]),
    ],
)
def test_failures_outside_the_model_end_every_rank_too(where: str, words: list[str]) -> None:
    script = (
        COMMON
        + f"""
    where = {where!r}
    mesh = Mesh.from_mpi(pp=2)
    if where == "import" and mesh.rank == 1:
        import no_such_module
    def data():
        if where == "data":
            raise ValueError("disk on fire")
        yield vectors(4)
    def loss(output, target):
        if where == "loss":
            raise ValueError("no loss")
        return F.mse_loss(output, target)
    pipe = pipert.Pipeline(tower(4), loss, mesh, microbatches=2)
    pipe.step(data() if mesh.rank == 0 else vectors(4))
    print("not reached")
    """
    )
    result = run_mpi(2, script, timeout=90, deadline=15)
    assert result.returncode != 0, result.text
    assert result.seconds < 60, result.text
    assert "not reached" not in result.stdout, result.text
    for word in words:
        assert word in result.stderr + result.stdout, result.text
