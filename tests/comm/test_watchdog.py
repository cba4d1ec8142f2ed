"""However a rank fails, every rank is gone soon, the exit code is not 0, and the first cause is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pipert.comm.board import Board, Kind, State
from pipert.comm.watchdog import Watchdog
from tests.mpi_harness import JobResult, run_mpi

pytestmark = pytest.mark.mpi

#: Rank 1 of 3 does what the first argument says at 1F3; rank 2 waits for it, rank 0 computes without looking up.
FAILING = """
    import os, sys, time
    mode, rank = sys.argv[1], int(os.environ["PMI_RANK"])
    if rank == 1 and mode == "import":
        import no_such_module
    if rank == 1 and mode == "silent":
        sys.exit(0)
    import torch
    from pipert.comm.mpi import MpiTransport

    def forward():
        if mode == "raise":
            error = ValueError("boom")
            error.add_note("in stage 1, micro-batch 3 (1F3)")
            raise error
        if mode == "caught":
            try:
                raise ValueError("boom")
            except ValueError as error:
                transport.abort(error)
            time.sleep(1000)
        if mode == "interrupt":
            raise KeyboardInterrupt
        if mode == "exit":
            sys.exit(3)
        if mode == "kill":
            os.kill(os.getpid(), 9)
        if mode == "stuck":  # Python's lock is never given back: no thread of this process runs any more
            import ctypes
            ctypes.PyDLL(None).sleep(1000)
        time.sleep(1000)

    transport = MpiTransport.world()
    transport.barrier()
    if rank == 1:
        transport.report("1F3")
        forward()
    elif rank == 2:
        transport.wait(transport.irecv(torch.zeros(3), 1, 0), "2RECV_F3", 1)
    else:
        transport.report("0F4")
        time.sleep(1000)
    """


def run_failing(mode: str, deadline: float = 60.0, script: str = FAILING) -> JobResult:
    result = run_mpi(3, script, [mode], timeout=90, deadline=deadline)
    assert result.returncode != 0, result.text
    return result


def assert_all_say(result: JobResult, words: str, ranks: range | list[int] = range(3)) -> None:
    for rank in ranks:
        assert re.search(rf"pipert: rank {rank} stops: .*{words}", result.stderr), f"rank {rank}: {result.text}"


def test_an_exception_stops_every_rank_and_all_print_it_with_its_notes() -> None:
    result = run_failing("raise")
    assert_all_say(result, "rank 1 failed first: ValueError: boom")
    assert result.stderr.count("in stage 1, micro-batch 3 (1F3)") >= 4  # the traceback's, and each rank's
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.count("Traceback") == 1  # the victims' stacks would hide the cause
    assert "in forward <" in result.stderr


def test_an_exception_that_is_caught_after_abort_ends_the_job_too() -> None:
    assert_all_say(run_failing("caught"), "rank 1 failed first: ValueError: boom")


def test_an_interrupt_of_one_rank_stops_all() -> None:
    assert_all_say(run_failing("interrupt"), "rank 1 failed first: KeyboardInterrupt")


def test_a_rank_that_leaves_by_sys_exit_is_missed_by_the_one_that_waits_for_it() -> None:
    result = run_failing("exit")
    assert_all_say(result, "rank 1 left while rank 2 waits in 2RECV_F3 from it")


def test_nobody_survives_a_killed_rank() -> None:
    result = run_failing("kill")  # MPICH's launcher kills the others at once; where it does not, they tell
    assert result.seconds < 30


def test_a_hang_is_reported_by_the_waiting_and_by_the_hung_rank() -> None:
    result = run_failing("hang", deadline=3)
    assert_all_say(result, "rank 2 waited 3.* s in 2RECV_F3 from rank 1; the deadline is 3 s")
    assert re.search(r"pipert: +rank 1 is in 1F3 for 3\.\d s", result.stderr), result.text
    assert re.search(r"its main thread is at script.py:\d+ in forward", result.stderr), result.text
    assert "PIPERT_DEADLINE" in result.stderr


def test_a_hang_inside_a_group_names_the_rank_of_the_world() -> None:
    script = """
        import time, torch
        from pipert.comm.mpi import MpiTransport
        transport = MpiTransport.world()
        group = transport.split(0 if transport.rank else None, -transport.rank)  # 2, 1: group rank 0 is rank 2
        transport.report(f"{transport.rank}F3")
        if transport.rank == 1:
            group.wait(group.iallreduce(torch.zeros(3)), "1REDUCE", None)
        time.sleep(1000)
        """
    result = run_mpi(3, script, timeout=90, deadline=3)
    assert result.returncode != 0
    assert_all_say(result, "rank 1 waited 3.* s in 1REDUCE from rank 2; the deadline is 3 s")


def test_a_rank_whose_python_is_stuck_cannot_hold_the_job() -> None:
    result = run_failing("stuck", deadline=5)
    assert_all_say(result, "rank 2 waited", [0, 2])
    assert "its Python has not run for" in result.stderr, result.text


@pytest.mark.parametrize("mode", ["import", "silent"])
def test_a_rank_that_ends_before_mpi_starts_is_missed_by_the_others(mode: str) -> None:
    result = run_failing(mode)
    assert "ModuleNotFoundError" in result.stderr or mode == "silent"
    assert "stops: rank 1 ended before MPI had started" in result.stderr, result.text


def test_a_script_that_ends_everywhere_keeps_its_own_exit_code() -> None:
    script = """
        import sys, time
        from pipert.comm.mpi import MpiTransport
        transport = MpiTransport.world()
        transport.barrier()
        time.sleep(0.5 * transport.rank)
        sys.exit(int(sys.argv[1]))
        """
    for code in (0, 3):
        result = run_mpi(3, script, [str(code)])
        assert result.returncode == code and "pipert" not in result.stderr, result.text


def test_a_failure_reaches_the_ranks_of_another_machine() -> None:
    """``PIPERT_NODE`` splits this machine into two, which share no board."""
    script = """
        import os, time
        os.environ["PIPERT_NODE"] = os.environ["PMI_RANK"]
        import torch
        from pipert.comm.mpi import MpiTransport
        transport = MpiTransport.world()
        transport.barrier()
        if transport.rank == 0:
            raise ValueError("boom")
        transport.wait(transport.irecv(torch.zeros(3), 0, 0), "1RECV_F3", 0)
        """
    result = run_mpi(2, script, timeout=90)
    assert result.returncode != 0
    assert "pipert: rank 1 stops: rank 0 failed first: ValueError: boom" in result.stderr, result.text


def test_failures_leave_no_file_behind() -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir():
        pytest.skip("this system has no /dev/shm")
    run_failing("raise")
    assert not list(shared.glob("pipert-*.board"))


# ---- the watchdog by itself -----------------------------------------------------------------------------------------


@pytest.fixture
def board(tmp_path: Path) -> Board:
    Board.create(tmp_path / "x.board", [0, 1])
    board = Board.open(tmp_path / "x.board", 0)
    board.join()
    return board


def test_a_killed_process_is_noticed_at_once(board: Board, tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from pipert.comm.board import Board\n"
        "board = Board.open(Path(sys.argv[1]), 1); board.join(); board.report('1F3'); print(flush=True); time.sleep(99)"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(board.path)], stdout=subprocess.PIPE)
    assert other.stdout is not None
    other.stdout.readline()
    noticed = threading.Event()
    watchdog = Watchdog(board, 0, noticed.set, period=30.0)
    watchdog.start()
    time.sleep(0.2)
    assert not board.aborted
    begin = time.monotonic()
    other.kill()
    assert noticed.wait(10) and time.monotonic() - begin < 5
    other.wait()
    cause = board.cause()
    assert cause is not None and (cause.rank, cause.kind) == (1, Kind.DIED)
    assert f"process {other.pid} was killed" in cause.text and "rank 1 is in 1F3" in cause.text


def test_a_process_that_has_finished_may_go(board: Board) -> None:
    other = Board.open(board.path, 1)
    child = os.fork()
    if child == 0:
        other.join()
        other.state(State.FINISHED)
        os._exit(0)
    time.sleep(0.3)
    watchdog = Watchdog(board, 0, lambda: None, period=0.05)
    watchdog.start()
    time.sleep(0.3)
    os.waitpid(child, 0)
    assert not board.aborted
    watchdog.stop()


def test_a_blocking_call_that_passes_its_deadline_ends_the_job(board: Board) -> None:
    noticed = threading.Event()
    Board.open(board.path, 1).join()
    watchdog = Watchdog(board, 0, noticed.set, period=0.05)
    watchdog.start()
    with watchdog.guard("making communicators", 60):
        time.sleep(0.2)
    assert not noticed.is_set() and board.statuses()[0].waits is None
    with watchdog.guard("making communicators", 0.1):
        assert noticed.wait(10)
    cause = board.cause()
    assert cause is not None and cause.text == "rank 0 waited 0.1 s, its deadline, in making communicators"
