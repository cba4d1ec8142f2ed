"""Starting jobs with `pipert launch`, and the doctor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipert import doctor as doctoring
from pipert.doctor import Finding, doctor
from pipert.launch import (
    Launcher,
    LaunchError,
    end_before_mpi,
    find_launcher,
    launch,
    memory_environment,
    session_processes,
    threads_per_rank,
)
from tests.mpi_harness import ROOT, run_mpi

#: Runs `launch` in a process of its own, as the command does.
LAUNCH = "import sys; from pipert.launch import launch; sys.exit(launch(int(sys.argv[1]), sys.argv[2:]))"


def launcher(ranks: int) -> list[str]:
    return [sys.executable, "-c", LAUNCH, str(ranks)]


@pytest.mark.mpi
def test_a_launched_job_says_what_it_runs_and_returns_its_exit_code() -> None:
    script = """
        import os, sys
        from pipert.comm.mpi import MpiTransport
        transport = MpiTransport.world()
        assert transport.size == 2 and os.environ["OMP_NUM_THREADS"] == "7"
        sys.stdout.write(f"argument {sys.argv[1]}\\n")  # in one piece, since both ranks write
        sys.exit(3)
        """
    result = run_mpi(2, script, ["--flag"], launcher=launcher(2), env={"OMP_NUM_THREADS": "7"})
    assert result.returncode == 3, result.text
    assert result.stdout.count("argument --flag") == 2
    assert "pipert launch: 2 ranks x 7 threads of" in result.stderr
    assert "the job ended with exit code 3" in result.stderr


def test_ranks_keep_the_memory_they_free_unless_the_user_told_malloc_something() -> None:
    assert memory_environment({}) == {
        "MALLOC_MMAP_THRESHOLD_": "33554432",
        "MALLOC_TRIM_THRESHOLD_": "1099511627776",
    }
    assert memory_environment({"MALLOC_ARENA_MAX": "2"}) == {}
    assert memory_environment({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}) == {}


@pytest.mark.mpi
def test_a_killed_rank_is_named_with_what_it_was_doing() -> None:
    script = """
        import os, time
        from pipert.comm.mpi import MpiTransport
        transport = MpiTransport.world()
        transport.barrier()
        transport.report(f"{transport.rank}F3")
        time.sleep(1.5)
        if transport.rank == 1:
            os.kill(os.getpid(), 9)
        time.sleep(100)
        """
    result = run_mpi(3, script, launcher=launcher(3), timeout=90)
    assert result.returncode != 0
    # Where the launcher kills the others first, the parent tells; else they do.
    assert "rank 1 died first: killed" in result.stderr or "rank 1 died: its process" in result.stderr, result.text
    assert "rank 1 is in 1F3 for 1." in result.stderr, result.text


@pytest.mark.mpi
@pytest.mark.parametrize("mode", ["raise", "import"])
def test_a_failed_rank_ends_a_launched_job(mode: str) -> None:
    script = """
        import os, sys, time
        if sys.argv[1] == "import" and os.environ["PMI_RANK"] == "1":
            import no_such_module
        from pipert.comm.mpi import MpiTransport
        transport = MpiTransport.world()
        transport.barrier()
        if transport.rank == 1:
            raise ValueError("boom")
        time.sleep(100)
        """
    result = run_mpi(2, script, [mode], launcher=launcher(2), timeout=90)
    assert result.returncode != 0, result.text
    words = "rank 1 failed first: ValueError: boom" if mode == "raise" else "rank 1 ended before MPI had started"
    assert f"rank 0 stops: {words}" in result.stderr, result.text


@pytest.mark.mpi
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_of_the_launcher_ends_every_rank(number: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\nfrom pathlib import Path\n"
        "Path(sys.argv[1], os.environ['PMI_RANK']).write_text(str(os.getpid()))\ntime.sleep(100)\n"
    )
    command = [*launcher(2), str(script), str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        until = time.monotonic() + 30
        while not all((tmp_path / rank).exists() and (tmp_path / rank).read_text() for rank in "01"):
            assert time.monotonic() < until
            time.sleep(0.05)
        pids = [int((tmp_path / rank).read_text()) for rank in "01"]
        process.send_signal(number)
        assert process.wait(20) == 128 + number
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    finally:
        process.kill()
        process.wait()


@pytest.mark.mpi
def test_a_launcher_that_is_killed_leaves_no_rank(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\nfrom pathlib import Path\n"
        "Path(sys.argv[1], 'pid').write_text(str(os.getpid()))\ntime.sleep(100)\n"
    )
    process = subprocess.Popen(
        [*launcher(1), str(script), str(tmp_path)],
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    until = time.monotonic() + 30
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < until
        time.sleep(0.05)
    process.kill()
    process.wait()
    pid = int((tmp_path / "pid").read_text())
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.mpi
def test_a_job_that_takes_too_long_is_killed_whole(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time\ntime.sleep(100)\n")
    lines: list[str] = []
    begin = time.monotonic()
    assert launch(2, [str(script)], timeout=1.0, say=lines.append) == 124
    assert time.monotonic() - begin < 20
    assert lines[-1] == "pipert launch: the job ended with exit code 124"


@pytest.mark.parametrize(
    ("ranks", "argv", "words"),
    [
        (0, ["x.py"], "0 ranks cannot run anything; use n >= 1"),
        (-1, ["x.py"], "use n >= 1"),
        (2, [], "nothing to run"),
        (2, ["no/such/script.py"], "there is no script 'no/such/script.py'"),
    ],
)
def test_what_cannot_be_launched_is_refused(ranks: int, argv: list[str], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        launch(ranks, argv)


def test_a_machine_without_an_mpi_is_told_how_to_get_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(LaunchError, match=r"no MPI launcher found .*pip install 'pipert\[mpich\]'.*PIPERT_MPIEXEC"):
        find_launcher({"PATH": str(tmp_path)})


def fake_launcher(folder: Path, version: str) -> Path:
    path = folder / "mpiexec"
    path.write_text(f"#!/bin/sh\necho '{version}'\n")
    path.chmod(0o755)
    return path


def test_each_kind_of_launcher_gets_its_own_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fake_launcher(tmp_path, "mpiexec (OpenRTE) 5.0.6")
    found = find_launcher({"PIPERT_MPIEXEC": str(path), "PATH": os.environ["PATH"]})
    assert (found.kind, found.version) == ("openmpi", "mpiexec (OpenRTE) 5.0.6")
    assert found.command(3, ["x.py", "-a"]) == [
        *(str(path), "--oversubscribe", "--bind-to", "none", "-n", "3"),
        *(sys.executable, "x.py", "-a"),
    ]
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert found.environment() == {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert found.environment() == {}
    other = Launcher(path, "other", "")
    assert other.command(2, ["x.py"]) == [str(path), "-n", "2", sys.executable, "x.py"]


def test_the_cores_are_shared_out_and_nobody_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert [threads_per_rank(ranks) for ranks in (1, 2, 3, 8, 100)] == [8, 4, 2, 1, 1]


@pytest.mark.parametrize(("rank", "said"), [(None, "ConfigError: x"), ("0", "ConfigError: x"), ("1", 1), ("12", 1)])
def test_what_every_rank_finds_out_before_mpi_starts_is_said_by_the_first(
    rank: str | None, said: str | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    if rank is not None:
        monkeypatch.setenv("PMI_RANK", rank)
    monkeypatch.setattr("pipert.launch._HEARD", 0.0)
    with pytest.raises(SystemExit) as ended:  # a text is printed, and the exit code is 1
        end_before_mpi("ConfigError: x")
    assert ended.value.code == said


def test_launching_imports_neither_torch_nor_mpi() -> None:
    code = "import sys, pipert.launch, pipert.doctor; print({'torch', 'mpi4py'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "set()"


def test_a_sessions_processes_are_found() -> None:
    process = subprocess.Popen(["sleep", "30"], start_new_session=True)
    try:
        assert session_processes(process.pid) == [process.pid]
    finally:
        process.kill()
        process.wait()
    assert session_processes(process.pid) == []


@pytest.mark.mpi
def test_the_doctor_looks_at_everything_and_says_so_as_it_goes() -> None:
    looked: list[str] = []
    findings = {finding.name: finding for finding in doctor(looked.append)}
    assert looked == ["Python", "MPI library", "launcher", "threads", "compilers", "GPUs", "RCCL", "Slurm", "messages"]
    assert {"g++", "hipcc", "clang", "nvcc"} < set(findings)
    for name in ("Python", "MPI library", "launcher", "threads", "messages"):
        assert findings[name].ok, findings[name]
    assert findings["RCCL"].ok or "not found" in findings["RCCL"].value
    assert "2 ranks" in findings["messages"].value and "\n" not in findings["messages"].value


def test_the_doctor_of_a_machine_without_mpi_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Launcher:
        raise LaunchError("no MPI launcher found; pip install 'pipert[mpich]'")

    monkeypatch.setattr(doctoring, "find_launcher", missing)
    findings = {finding.name: finding for finding in doctor(message_test=False)}
    assert findings["launcher"] == Finding(
        "launcher", "none", False, "no MPI launcher found; pip install 'pipert[mpich]'"
    )
    assert "messages" not in findings
