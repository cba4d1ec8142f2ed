"""RCCL for tensors and MPI for the rest, on real processes: numbers, and how a job ends when something fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi_harness import JobResult, run_mpi

pytestmark = pytest.mark.mpi

COMMON = """
    import copy, ctypes, os, sys, time
    import torch
    from torch.nn import functional as F
    torch.set_num_threads(1)
    import pipert
    from pipert.comm.mesh import Mesh
    from pipert.config import load_config
    from pipert.recipe import make_mesh
    from pipert.verify_run import verify_run
    from tests.engine.world import *
    from tests.test_verify_run import SMALL, TINY

    def fault(what, nth, seconds=0.0):
        arguments = ctypes.c_char(what), ctypes.c_longlong(nth), ctypes.c_double(seconds)
        ctypes.CDLL(os.environ["PIPERT_RCCL"]).standinFault(*arguments)
"""


def run(ranks: int, script: str, library: Path, **options: object) -> JobResult:
    return run_mpi(ranks, COMMON + script, timeout=240, env={"PIPERT_RCCL": str(library)}, **options)


def test_processes_get_the_numbers_of_one_over_rccl(standin: Path, tmp_path: Path) -> None:
    script = """
    model = gpt(layers=4, hidden=16, tied=True)
    steps = [[tokens(4, seed=2 * s), tokens(3, length=12, seed=2 * s + 1)] for s in range(2)]
    for pp, dp, tensors, schedule, chunks in [
        (4, 1, "rccl", "1f1b", 1), (2, 2, "rccl-direction", "interleaved", 2)
    ]:
        mesh = Mesh.from_mpi(pp=pp, dp=dp, tensors=tensors)
        assert mesh.pp_group.semantics["name"] == {"rccl": "rccl-pair"}.get(tensors, tensors)
        fault(b"d", mesh.rank, 0.002)
        own = [step[:dp] for step in steps]
        pipe = pipert.Pipeline(copy.deepcopy(model), token_loss, mesh, schedule=schedule, chunks=chunks, microbatches=3)
        optim, outcome = ADAMW(pipe.parameters()), Outcome()
        for number, replicas in enumerate(own):
            optim.zero_grad()
            outcome.results.append(pipe.step(replicas[mesh.dp_rank]))
            outcome.norms.append(pipe.grad_norm())
            optim.step()
        plain = run_plain(model, token_loss, [[parts(b, 3) for b in step] for step in own], optimizer=ADAMW)
        outcome.gradients = {n: p.grad for n, p in pipe.named_parameters()}
        outcome.weights = {n: p.detach() for n, p in pipe.named_parameters()}
        for kind in ("gradients", "weights"):
            setattr(plain, kind, {n: getattr(plain, kind)[n] for n in getattr(outcome, kind)})
        assert_same(outcome, plain, 1e-10)
        assert mesh.pp_group.counters.messages["send"] > 3
        there = mesh.pp_group.control.counters.messages
        assert there["send"] + there["receive"] > 0
        mesh.close()
    # layers shared out, too
    settings = [*SMALL, f"data.folder={sys.argv[1]}", "parallel.tensors=rccl", "parallel.tp=2"]
    for more in (["parallel.pp=2", "parallel.dp=1", "parallel.schedule=zb-h1"], ["parallel.pp=1", "parallel.zero=3"]):
        config = load_config(TINY, [*settings, *more])
        mesh = make_mesh(config)
        comparison = verify_run(config, mesh, 1, torch.float64)
        assert comparison.ok, comparison
        assert mesh.tp_group.counters.messages["allreduce"] > 9
        mesh.close()
    # quiet, signalling and negative NaNs; sums in bf16
    mesh = Mesh.from_mpi(pp=4, tensors="rccl")
    group = mesh.pp_group
    group.connect([(0, 1), (2, 3)])
    peer = mesh.rank ^ 1
    nan = torch.tensor([0x7FC1, 0x7F81, -1, -63], dtype=torch.int16).view(torch.bfloat16)
    got, ones = torch.zeros(4, dtype=torch.bfloat16), torch.ones(9, dtype=torch.bfloat16)
    with group.group():
        requests = [group.isend(nan, peer, 0), group.irecv(got, peer, 0)]
    for request in (*requests, group.iallreduce(ones)):
        group.wait(request, "1RECV_F0", peer)
    assert got.view(torch.int16).tolist() == [0x7FC1, 0x7F81, -1, -63] and (ones == 4).all()
    print("rank", mesh.rank, "is well")
    mesh.close()
    """
    result = run(4, script, standin, args=[str(tmp_path)], deadline=60)
    assert result.returncode == 0, result.text
    assert result.stdout.count("is well") == 4, result.text


FAILURES = {
    "raises": ("raise RuntimeError('bang')", ["RuntimeError: bang", "rank 1, stage 1, micro-batch 3, action 1F3"]),
    "is killed": ("os.kill(os.getpid(), 9)", ["ignal 9"]),
    "exits": ("sys.exit(3)", ["SystemExit: 3", "micro-batch 3, action 1F3"]),
    "hangs": ("time.sleep(1000)", ["1F3"]),
    "loses its network": ("fault(b'e', 0)", ["RcclError", "ncclSystemError", "the network went away"]),
}


@pytest.mark.parametrize("how", FAILURES)
def test_every_rank_is_gone_and_the_first_cause_printed_when_one(how: str, standin: Path) -> None:
    act, words = FAILURES[how]
    script = f"""
    def act():
        {act}
    mesh = Mesh.from_mpi(pp=2, tensors="rccl")
    rows = [Residual(6), Bomb(6, act)]
    pipe = pipert.Pipeline(torch.nn.Sequential(*rows).double(), F.mse_loss, mesh, microbatches=6)
    pipe.step(vectors(6))
    print("not reached")
    """
    result = run(2, script, standin, deadline=12)
    assert result.returncode != 0, result.text
    assert "not reached" not in result.stdout, result.text
    for word in words:
        assert word in result.stderr + result.stdout, result.text
