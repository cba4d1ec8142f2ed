"""What a launcher promises, read from the environment."""

from __future__ import annotations

import pytest

from pipert.comm.errors import OptionError, TransportError
from pipert.comm.mpi_job import seconds_from_environment
from pipert.comm.mpi_start import check_size, promised_local_rank, promised_rank, promised_size


@pytest.mark.parametrize(
    ("environ", "promise"),
    [
        ({}, None),
        ({"PMI_SIZE": "4"}, ("PMI_SIZE", 4)),
        ({"OMPI_COMM_WORLD_SIZE": "2", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "8"}, ("OMPI_COMM_WORLD_SIZE", 2)),
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "8"}, ("SLURM_NTASKS", 8)),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "6", "SLURM_NTASKS": "8"}, ("SLURM_STEP_NUM_TASKS", 6)),
        ({"SLURM_JOB_ID": "17", "SLURM_NTASKS": "8"}, None),  # a batch script without srun: one process is right
        ({"PMI_SIZE": "many"}, None),
    ],
)
def test_the_promise_is_the_innermost_launchers(environ: dict[str, str], promise: tuple[str, int] | None) -> None:
    assert promised_size(environ) == promise


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({}, None),
        ({"PMI_RANK": "3"}, 3),
        ({"OMPI_COMM_WORLD_RANK": "0", "SLURM_PROCID": "2"}, 0),
        ({"SLURM_PROCID": "2"}, 2),
        ({"PMI_RANK": "none"}, None),
    ],
)
def test_a_rank_is_what_the_innermost_launcher_says(environ: dict[str, str], rank: int | None) -> None:
    assert promised_rank(environ) == rank


def test_a_ranks_number_on_its_machine_is_what_the_launcher_says() -> None:
    assert promised_local_rank({}) is None
    assert promised_local_rank({"MPI_LOCALRANKID": "3", "SLURM_LOCALID": "0"}) == 3
    assert promised_local_rank({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}) == promised_local_rank({"SLURM_LOCALID": "1"}) == 1


def test_a_world_of_another_size_than_promised_is_refused_with_the_remedy() -> None:
    check_size(4, "MPICH", {"PMI_SIZE": "4"})
    check_size(4, "MPICH", {})
    with pytest.raises(TransportError, match=r"world of 1 .* promised 4 ranks \(SLURM_NTASKS=4\).*srun --mpi=list"):
        check_size(1, "MPICH", {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"})


@pytest.mark.parametrize("text", ["soon", "-1", "0", "nan"])
def test_a_time_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPERT_DEADLINE", text)
    with pytest.raises(OptionError, match=f"PIPERT_DEADLINE = '{text}' is not a time; give a positive number"):
        seconds_from_environment("PIPERT_DEADLINE", 300.0)


def test_a_time_that_is_not_given_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPERT_DEADLINE", raising=False)
    assert seconds_from_environment("PIPERT_DEADLINE", 300.0) == 300.0
    monkeypatch.setenv("PIPERT_DEADLINE", "2.5")
    assert seconds_from_environment("PIPERT_DEADLINE", 300.0) == 2.5
