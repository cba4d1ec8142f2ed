"""Configured layouts over RCCL's stand-in: tensor-parallel layers, pipelines and ZeRO together, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipert.comm import rccl_family
from pipert.comm.errors import TransportError
from pipert.comm.local import run_ranks
from pipert.comm.mesh import Mesh
from pipert.comm.mixed import MixedTransport
from pipert.comm.rccl_pairs import Queues
from pipert.comm.transport import Transport
from pipert.config import Config
from pipert.errors import ConfigError
from pipert.recipe import check_mesh, make_mesh
from pipert.verify_run import Comparison, verify_run
from tests.mpi_harness import run_mpi
from tests.test_verify_run import SMALL, TINY, configured

pytestmark = pytest.mark.usefixtures("rccl")

LAYOUTS = [
    "parallel.tp=4 parallel.dp=1 parallel.recompute=selective",
    "parallel.pp=2 parallel.tp=2 parallel.dp=1 parallel.sequence_parallel=true parallel.schedule=zb-h1",
    "parallel.pp=2 parallel.tp=2 parallel.zero=3 parallel.schedule=interleaved parallel.chunks=2",
    "parallel.pp=2 parallel.tp=2 parallel.zero=1 parallel.schedule=zb-v optimizer.early=true "
    "parallel.tensors=rccl-direction",
    "parallel.pp=3 parallel.dp=1 parallel.vocabulary=spread",
]


def laid_out(transport: Transport, config: Config) -> Mesh:
    """The configured mesh, of ranks that are threads."""
    parallel = config.parallel
    world = MixedTransport.over(transport, "direction" if parallel.tensors == "rccl-direction" else "pair")
    return Mesh.from_transport(world, pp=parallel.pp, dp=parallel.dp, tp=parallel.tp)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_train_to_the_numbers_of_one_process_over_rccl(layout: str, tmp_path: Path) -> None:
    settings = ["parallel.pp=1", "parallel.tensors=rccl", "model.dropout=0.1", *layout.split()]
    config = configured(tmp_path, *settings)

    def rank(transport: Transport) -> tuple[Comparison, int]:
        mesh = laid_out(transport, config)
        comparison = verify_run(config, mesh, 2 if config.parallel.zero else 1, torch.float64)
        moved = [group.counters.bytes.total() for group in (mesh.dp_group, mesh.tp_group) if group.size > 1]
        mesh.close()
        return comparison, min(moved, default=1)

    for comparison, moved in run_ranks(config.parallel.world, rank, deadline=60):
        assert comparison.ok and comparison.tolerance == 1e-10, comparison
        assert moved > 0


def test_a_mesh_that_moves_tensors_otherwise_than_configured_is_refused(tmp_path: Path) -> None:
    shape = ["parallel.pp=2", "parallel.dp=1"]
    plain, over_rccl = configured(tmp_path, *shape), configured(tmp_path, *shape, "parallel.tensors=rccl")

    def rank(transport: Transport) -> None:
        with pytest.raises(ConfigError, match=r"tensors is rccl but the mesh moves them over local.*make_mesh"):
            check_mesh(over_rccl, Mesh.from_transport(transport, pp=2))
        mesh = laid_out(transport, over_rccl)
        assert mesh.device == torch.device("cpu")  # of the stand-in
        with pytest.raises(ConfigError, match="tensors is mpi but the mesh moves them over rccl-pair"):
            check_mesh(plain, mesh)
        check_mesh(over_rccl, mesh)
        mesh.close()

    run_ranks(2, rank)


def test_more_streams_than_a_gpu_runs_at_once_are_refused_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    queues: list[int] = [2]
    monkeypatch.setattr(rccl_family, "queues_of", lambda *_, hip: Queues("GPU_MAX_HW_QUEUES", queues[0]))

    def of_groups(transport: Transport) -> None:
        with pytest.raises(TransportError, match=r"0 streams for messages, 2 for.*runs 2 queues.*GPU_MAX_HW_QUEUES=8"):
            Mesh.from_transport(MixedTransport.over(transport), pp=2, tp=2)

    def of_messages(transport: Transport) -> None:
        mesh = Mesh.from_transport(MixedTransport.over(transport), pp=2, tp=2)
        with pytest.raises(TransportError, match=r"1 streams for messages, 2 for.*runs 3 queues"):
            mesh.pp_group.connect([(0, 1)])
        mesh.close()  # counts no longer
        Mesh.from_transport(mesh.world, tp=4)

    run_ranks(4, of_groups)
    queues[0] = 3
    run_ranks(4, of_messages)


def test_the_ranks_of_a_machine_get_its_gpus_in_turn_before_the_mesh_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    monkeypatch.setenv("MPI_LOCALRANKID", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(Mesh, "from_mpi", lambda **options: calls.append(options["tensors"]))
    for tensors in ("mpi", "rccl"):
        make_mesh(configured(tmp_path, f"parallel.tensors={tensors}"))
    assert calls == ["mpi", 3, "rccl"]


@pytest.mark.mpi
def test_a_configured_run_without_the_library_ends_with_one_sentence_on_every_rank(tmp_path: Path) -> None:
    settings = [*SMALL, "parallel.pp=2", "parallel.dp=1", "parallel.tensors=rccl", f"run.output={tmp_path}"]
    script = "from pipert.cli import main; main()"
    result = run_mpi(2, script, ["verify-run", str(TINY), *settings], env={"PIPERT_RCCL": "/no/such/librccl.so"})
    assert result.returncode == 2, result.text
    sentence = "TransportError: rank 0: the RCCL library /no/such/librccl.so cannot be loaded"
    assert result.stderr.count(sentence) == 2 and result.stderr.count("correct or unset PIPERT_RCCL") == 2, result.text
    assert "Traceback" not in result.text
