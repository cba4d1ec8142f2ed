"""The transport over torch.distributed, on real gloo processes: one job does all that works, others fail on purpose."""

from __future__ import annotations

import json
import os
import socket
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipert.comm.errors import TransportError
from pipert.comm.mesh import Mesh
from tests.mpi_harness import ROOT, JobResult, run_group

HEAD = """
    import json, math, os, sys, time
    import torch, torch.distributed as dist
    from pipert.comm.errors import *
    from pipert.comm.mesh import Mesh
    from pipert.comm.torch_distributed import TorchTransport

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=os.environ["WHERE"], rank=rank, world_size=size)
"""


def run_torch(size: int, script: str, folder: Path, where: str | None = None, timeout: float = 60.0) -> list[JobResult]:
    """Run a script, after HEAD, in ``size`` processes, and give back how each ended."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(HEAD) + textwrap.dedent(script))
    where = where or f"file://{folder / 'store'}"
    common = {"WORLD_SIZE": str(size), "WHERE": where, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(path)]
    with ThreadPoolExecutor(size) as pool:
        environments = [os.environ | common | {"RANK": str(rank)} for rank in range(size)]
        return list(pool.map(lambda environ: run_group(command, timeout, environ), environments))


def tcp() -> str:
    """A store that lives in rank 0 and dies with it, as under torchrun."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


CHECKS = """
    found = {}
    # A trainer that has made a group of its own before, on some of the ranks only.
    dist.new_group([0, 1])
    world = TorchTransport.over(deadline=20)
    right, left = (rank + 1) % size, (rank - 1) % size

    def bits(tensor):
        return tensor.contiguous().view(-1).view(torch.uint8).tolist()

    def pattern(dtype, shape, seed):
        tensor = torch.empty(shape, dtype=dtype)
        high = 2 if dtype == torch.bool else 256
        tensor.view(-1).view(torch.uint8).random_(0, high, generator=torch.Generator().manual_seed(seed))
        return tensor

    dtypes = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
              torch.complex64, torch.complex128, torch.float8_e4m3fn]
    wrong, requests, received = [], [], []
    for number, dtype in enumerate(dtypes):
        for place, shape in enumerate([(), (0,), (3, 5)]):
            tag = 10 * number + place
            into = torch.empty(shape, dtype=dtype)
            requests += [world.irecv(into, left, tag), world.isend(pattern(dtype, shape, 100 * rank + tag), right, tag)]
            received.append((into, pattern(dtype, shape, 100 * left + tag), str(dtype)))
    for request in reversed(requests):
        world.wait(request)
    found["dtypes that changed"] = [name for into, sent, name in received if bits(into) != bits(sent)]

    first, second = torch.zeros(1), torch.zeros(1)
    requests = [world.isend(torch.tensor([1.0]), right, 1), world.isend(torch.tensor([2.0]), right, 2),
                world.irecv(second, left, 2), world.irecv(first, left, 1)]
    for request in requests:
        world.wait(request)
    found["matched by tag"] = [first.item(), second.item()]

    late = world.irecv(first, left, 7)
    before = late.test()
    world.barrier()
    world.wait(world.isend(second, right, 7))
    until = time.monotonic() + 20
    while not late.test() and time.monotonic() < until:
        world.progress()
    found["polled"] = [before, late.test()]

    refused = []
    for start in (lambda: world.isend(torch.zeros(2, 2).t(), right, 0), lambda: world.isend(torch.zeros(1), size, 0),
                  lambda: world.irecv(torch.zeros(1), left, 2**31), lambda: world.isend(torch.zeros(1), rank, 0),
                  lambda: world.iallreduce(torch.zeros(1), "mean"),
                  lambda: world.iallgather(torch.zeros(1), torch.zeros(1)),
                  lambda: world.isend(torch.zeros(1, device="meta"), right, 0)):
        try:
            start()
            refused.append("accepted")
        except MessageError as error:
            refused.append(str(error))
    found["refused"] = refused

    found["sums"] = {}
    for dtype in [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int16,
                  torch.complex64]:
        value = torch.full((3,), rank + 1).to(dtype)
        world.wait(world.iallreduce(value))
        found["sums"][str(dtype)] = torch.view_as_real(value)[0, 0].item() if dtype.is_complex else value[0].item()
    small = torch.tensor([256.0 if rank == 0 else 0.9], dtype=torch.bfloat16)
    world.wait(world.iallreduce(small))
    found["bf16 rounds once"] = small.item()
    noise = torch.randn(1001, generator=torch.Generator().manual_seed(rank))
    again = noise.clone()
    world.wait(world.iallreduce(noise))
    world.wait(world.iallreduce(again))
    found["noise"] = [bits(noise) == bits(again), bits(noise)]
    flag, values = torch.tensor([rank == 2]), torch.tensor([float(rank), math.nan if rank == 1 else 0.0])
    world.wait(world.iallreduce(flag, "max"))
    world.wait(world.iallreduce(values, "max"))
    found["max"] = [flag.item(), values[0].item(), math.isnan(values[1].item())]

    part, halves = torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)
    world.wait(world.ireduce_scatter(part, torch.arange(2.0 * size) + rank))
    world.wait(world.ireduce_scatter(halves, torch.ones(2 * size, dtype=torch.bfloat16)))
    out = torch.full((size,), -1, dtype=torch.bfloat16)
    out[rank] = rank
    world.wait(world.iallgather(out, out[rank:rank + 1]))
    copied = torch.tensor([rank == 3, True])
    world.wait(world.ibroadcast(copied, 3))
    for request in (world.iallreduce(torch.zeros(0)), world.iallgather(torch.zeros(0), torch.zeros(0)),
                    world.ireduce_scatter(torch.zeros(0), torch.zeros(0)), world.ibroadcast(torch.zeros(0), 0)):
        world.wait(request)
    found["parts"] = [part.tolist(), halves.tolist(), out.tolist(), copied.tolist()]
    found["exchange"] = [len(blob) for blob in world.exchange(b"x" * rank * 1000)]

    mesh = Mesh.from_torch_distributed(pp=2, dp=2, deadline=20)
    groups = (mesh.pp_group, mesh.dp_group, mesh.tp_group)
    found["mesh"] = [list(mesh.coordinates), [[int(b) for b in g.exchange(str(rank).encode())] for g in groups]]
    try:
        Mesh.from_torch_distributed(pp=4, tp=2)
    except MeshError as error:
        found["mesh refused"] = str(error)
    try:
        world.split(0, -rank)
    except OptionError as error:
        found["keys refused"] = str(error)
    pair = mesh.dp_group.split(None if rank == 3 else 0, mesh.dp_group.rank)  # a part of a part of the ranks
    found["split of a split"] = None if pair is None else [int(b) for b in pair.exchange(str(rank).encode())]
    found["counted"] = [mesh.pp_group.counters.messages["exchange"], world.counters.bytes["broadcast"]]
    try:
        mesh.pp_group.split(0, mesh.pp_group.rank)  # of its two ranks, one is in the trainer's group
    except TransportError as error:
        found["uneven"] = str(error)
    mesh.close()
    try:
        mesh.pp_group.isend(torch.zeros(1), 0, 0) if mesh.pp_rank else mesh.pp_group.isend(torch.zeros(1), 1, 0)
    except TransportError as error:
        found["closed"] = str(error)
    dist.barrier()  # the trainer's group is still there
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What each of four ranks found when it ran all the checks."""
    results = run_torch(4, CHECKS, tmp_path_factory.mktemp("torch"))
    assert [result.returncode for result in results] == [0] * 4, results[0].text + results[1].text
    return [json.loads(result.stdout.splitlines()[-1]) for result in results]


def test_every_dtype_arrives_bit_for_bit(found) -> None:
    assert [each["dtypes that changed"] for each in found] == [[]] * 4


def test_messages_are_matched_by_tag(found) -> None:
    assert [each["matched by tag"] for each in found] == [[1.0, 2.0]] * 4


def test_polling_without_waiting_ends(found) -> None:
    assert [each["polled"] for each in found] == [[False, True]] * 4


def test_messages_that_cannot_be_are_refused(found) -> None:
    for each in found:
        contiguous, dest, tag, itself, op, parts, device = each["refused"]
        assert "not contiguous" in contiguous
        assert "dest = 4 is not a rank of this group of 4" in dest
        assert f"takes 0 <= tag < {2**31}" in tag
        assert "itself" in itself
        assert "'mean' is not a reduction" in op
        assert "allgather: 1 elements are not 4 ranks x 1" in parts
        assert "meta" in device


def test_sums_are_right_in_every_dtype_and_round_once(found) -> None:
    for each in found:
        assert set(each["sums"].values()) == {10}
        assert each["bf16 rounds once"] == 258.0  # 258.7 in fp32; one by one in bf16 it stays at 256
        assert each["noise"] == [True, found[0]["noise"][1]]


def test_a_maximum_lets_nan_through_and_takes_bools(found) -> None:
    assert [each["max"] for each in found] == [[True, 3.0, True]] * 4


def test_parts_are_scattered_gathered_and_broadcast(found) -> None:
    for rank, each in enumerate(found):
        part = [4 * (2 * rank) + 6, 4 * (2 * rank + 1) + 6]
        assert each["parts"] == [part, [4.0, 4.0], [0.0, 1.0, 2.0, 3.0], [True, True]]
        assert each["exchange"] == [0, 1000, 2000, 3000]


def test_a_mesh_over_the_trainers_group_has_its_groups_although_the_trainer_has_uneven_ones(found) -> None:
    assert [each["mesh"] for each in found] == [
        [[0, 0, 0], [[0, 2], [0, 1], [0]]],
        [[0, 1, 0], [[1, 3], [0, 1], [1]]],
        [[1, 0, 0], [[0, 2], [2, 3], [2]]],
        [[1, 1, 0], [[1, 3], [2, 3], [3]]],
    ]
    assert all(each["mesh refused"].startswith("pp*tp*dp = 8 but 4 ranks") for each in found)
    assert [each["counted"] for each in found] == [[1, 2]] * 4
    assert all("closed" in each["closed"] for each in found)


def test_groups_that_torch_cannot_make_are_refused(found) -> None:
    assert all("the keys [0, -1, -2, -3] of color 0 reorder its ranks" in each["keys refused"] for each in found)
    assert [each["split of a split"] for each in found] == [[0, 1], [0, 1], [2], None]
    assert all("lay the mesh over the default group" in each["uneven"] for each in found)


def test_without_a_process_group_it_says_what_to_call() -> None:
    with pytest.raises(TransportError, match=r"call torch\.distributed\.init_process_group first"):
        Mesh.from_torch_distributed(pp=1)


def test_when_a_rank_raises_the_others_learn_its_words(tmp_path: Path) -> None:
    script = """
        mesh = Mesh.from_torch_distributed(pp=3, deadline=20)
        try:
            if rank == 1:
                raise ValueError("stage 1 broke")
            # Rank 2 waits for rank 0, which waits for rank 1: no connection of rank 2's breaks at first.
            mesh.pp_group.wait(mesh.pp_group.irecv(torch.zeros(1), {0: 1, 2: 0}[rank], 3), "RECV_F3")
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", flush=True)
            mesh.pp_group.abort(error)
            time.sleep(1.5)  # nobody's death tells anybody: the message must
            os._exit(1)
    """
    results = run_torch(3, script, tmp_path, tcp())
    assert [result.returncode for result in results] == [1, 1, 1]
    assert results[1].stdout.strip() == "ValueError: stage 1 broke"
    for rank in (0, 2):
        assert results[rank].stdout.strip() == "JobAborted: rank 1 failed first: ValueError: stage 1 broke"
        assert results[rank].seconds < 20


def test_when_a_rank_dies_the_others_get_an_error(tmp_path: Path) -> None:
    script = """
        world = TorchTransport.over(deadline=20)
        world.barrier()
        if rank == 1:
            os._exit(9)
        try:
            world.wait(world.irecv(torch.zeros(1), 1, 0), "RECV_B0")
        except CommError as error:
            print(type(error).__name__, flush=True)
            os._exit(4)
    """
    results = run_torch(2, script, tmp_path, tcp())
    assert [result.returncode for result in results] == [4, 9]
    assert results[0].stdout.strip() in ("TransportError", "JobAborted")


def test_a_wait_past_its_deadline_says_what_it_waits_for(tmp_path: Path) -> None:
    script = """
        world = TorchTransport.over(deadline=1.0)
        world.barrier()
        if rank == 0:
            try:
                world.wait(world.irecv(torch.zeros(1), 1, 0), "0RECV_B4", 1)
            except HangError as error:
                print(error, flush=True)
                os._exit(5)
        time.sleep(2.5)
        try:
            world.progress()
        except JobAborted as error:
            print(error, flush=True)
            os._exit(6)
    """
    results = run_torch(2, script, tmp_path, tcp())
    said = "rank 0 has waited 1 s, its deadline, in 0RECV_B4 for rank 1"
    assert results[0].stdout.strip() == said
    assert [result.returncode for result in results] == [5, 6]
    assert results[1].stdout.strip()
