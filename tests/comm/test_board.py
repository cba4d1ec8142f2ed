"""The status board and what is said from it."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest
import torch

from pipert.comm.board import Board, Cause, Kind, State, Status
from pipert.comm.errors import TransportError
from pipert.comm.reports import chain, describe, exception_text, farewell, post_mortem


@pytest.fixture
def boards(tmp_path: Path) -> tuple[Board, Board]:
    """The board of the ranks 4 and 6 of a world, as each of them sees it."""
    path = tmp_path / "x.board"
    Board.create(path, [4, 6])
    first, second = Board.open(path, 0), Board.open(path, 1)
    first.join()
    second.join()
    return first, second


def test_what_one_rank_writes_the_others_read(boards: tuple[Board, Board]) -> None:
    first, second = boards
    first.report("3F2")
    first.wait_in("3RECV_F3", 6, time.monotonic() - 5)
    status = second.statuses()[0]
    assert (status.rank, status.state, status.doing) == (4, State.RUNNING, "3F2")
    assert (status.waits, status.peer, status.told) == ("3RECV_F3", 6, False)
    assert describe(status, time.monotonic()) == "rank 4 waits 5.0 s in 3RECV_F3 from rank 6"
    first.wait_over()
    first.tell()
    status = second.statuses()[0]
    assert status.waits is None and status.told
    assert describe(status, time.monotonic()).startswith("rank 4 is in 3F2 for 0.")


def test_texts_of_any_length_and_script_fit(boards: tuple[Board, Board]) -> None:
    first, second = boards
    first.report("é" * 500)
    assert second.statuses()[0].doing.startswith("ééé")
    first.report("short")
    assert second.statuses()[0].doing == "short"
    assert second.claim(Cause(6, Kind.ERROR, "long " * 5000, 1.0))
    cause = first.cause()
    assert cause is not None and cause.text.startswith("long long") and len(cause.text) > 3000


def test_a_report_costs_about_a_microsecond(boards: tuple[Board, Board]) -> None:
    board = boards[0]
    costs = []
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(1000):
            board.report("12RECV_F34")
        costs.append((time.perf_counter() - begin) / 1000)
    assert min(costs) < 3e-6


def test_the_first_cause_is_claimed_once_and_stays(boards: tuple[Board, Board]) -> None:
    first, second = boards
    assert not first.aborted and first.cause() is None
    cause = Cause(6, Kind.ERROR, "ValueError: boom\n  in 2F3", 12.5)
    assert second.claim(cause)
    assert not first.claim(Cause(4, Kind.HANG, "later", 13.0))
    assert first.aborted and first.cause() == second.cause() == cause


def _claim(path: Path, rank: int, barrier: object, won: object) -> None:
    board = Board.open(path, rank)
    barrier.wait()  # type: ignore[attr-defined]
    if board.claim(Cause(rank, Kind.ERROR, f"mine: {rank}" * 50, 0.0)):
        won.put(rank)  # type: ignore[attr-defined]


def test_of_many_processes_that_claim_at_once_one_wins(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for attempt in range(5):
        path = tmp_path / f"{attempt}.board"
        Board.create(path, range(6))
        barrier, won = context.Barrier(6), context.Queue()
        processes = [context.Process(target=_claim, args=(path, rank, barrier, won)) for rank in range(6)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(20)
        winner = won.get(timeout=5)
        assert won.empty()
        cause = Board.open(path).cause()
        assert cause is not None and cause.rank == winner and cause.text == f"mine: {winner}" * 50


def test_another_file_is_no_board(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="cannot be opened"):
        Board.open(tmp_path / "missing")
    (tmp_path / "other").write_bytes(b"x" * 5000)
    with pytest.raises(TransportError, match="is not a status board"):
        Board.open(tmp_path / "other")


def status(rank: int, waits_for: int | None = None, **changes: object) -> Status:
    values: dict[str, object] = {
        "rank": rank,
        "pid": 100 + rank,
        "state": State.RUNNING,
        "told": False,
        "doing": f"{rank}F0",
        "since": 10.0,
        "waits": None if waits_for is None else f"{rank}RECV_F1",
        "peer": waits_for,
        "waits_since": 20.0,
        "beat": 30.0,
    }
    return Status(**(values | changes))  # type: ignore[arg-type]


def test_a_chain_of_waits_ends_at_the_rank_that_holds_everybody_up() -> None:
    assert chain([status(0, 1), status(1, 2), status(2)], 0, 30.0).splitlines() == [
        "rank 0 waits 10.0 s in 0RECV_F1 from rank 1",
        "  rank 1 waits 10.0 s in 1RECV_F1 from rank 2",
        "    rank 2 is in 2F0 for 20.0 s",
    ]


def test_a_circle_of_waits_is_called_one() -> None:
    lines = chain([status(0, 1), status(1, 2), status(2, 1)], 0, 30.0).splitlines()
    assert lines[-1].strip() == "a circle: none of the ranks 1, 2 can go on"


@pytest.mark.parametrize(
    ("peer", "words"),
    [
        (status(1, state=State.LEFT), "rank 1 has left: its script has ended"),
        (status(1, state=State.FAILED), "rank 1 has failed, last in 1F0"),
        (status(1, state=State.ABSENT), "rank 1 has not started"),
        (status(1, beat=20.0), "rank 1 is in 1F0 for 20.0 s, and its Python has not run for 10.0 s (stuck or stopped)"),
    ],
)
def test_a_chain_says_what_became_of_the_rank_that_owes(peer: Status, words: str) -> None:
    assert chain([status(0, 1), peer], 0, 30.0).splitlines()[1].strip() == words


def test_a_rank_of_another_machine_is_named_as_such() -> None:
    assert "rank 9 is on another machine" in chain([status(0, 9)], 0, 30.0)


def test_everybody_prints_the_first_cause_and_what_held_them_up() -> None:
    cause = Cause(1, Kind.ERROR, "ValueError: boom\n  in stage 1, 1F3", 0.0)
    assert farewell(cause, [status(0, 1), status(1)], 0, 30.0, "train.py:7 in step").splitlines() == [
        "pipert: rank 0 stops: rank 1 failed first: ValueError: boom",
        "pipert:     in stage 1, 1F3",
        "pipert:   rank 0 waits 10.0 s in 0RECV_F1 from rank 1",
        "pipert:     rank 1 is in 1F0 for 20.0 s",
        "pipert:   its main thread is at train.py:7 in step",
    ]


def test_an_exception_is_told_with_its_notes_place_and_cause() -> None:
    def broken() -> None:
        try:
            raise KeyError("x")
        except KeyError as error:
            problem = ValueError("boom\nsecond line")
            problem.add_note("in stage 2, 2F3")
            raise problem from error

    with pytest.raises(ValueError, match="boom") as caught:
        broken()
    lines = exception_text(caught.value).splitlines()
    assert lines[:2] == ["ValueError: boom", "  in stage 2, 2F3"]
    assert lines[2].startswith("  at test_board.py:") and "in broken < test_board.py:" in lines[2]
    assert lines[3] == "  because of KeyError: 'x'"


def test_a_post_mortem_lists_each_ranks_last_words() -> None:
    text = post_mortem(Cause(1, Kind.DIED, "rank 1 died", 0.0), [status(0, 1), status(1)], 30.0)
    assert text.splitlines() == [
        "first cause: rank 1 died",
        "  rank 0 waits 10.0 s in 0RECV_F1 from rank 1",
        "  rank 1 is in 1F0 for 20.0 s",
    ]


def test_a_place_inside_nested_modules_is_told_by_their_forwards_alone() -> None:
    class Raises(torch.nn.Module):
        def forward(self, x: int) -> int:
            raise ValueError(x)

    with pytest.raises(ValueError) as caught:
        torch.nn.Sequential(torch.nn.Sequential(Raises()))(1)
    place = exception_text(caught.value).splitlines()[-1]
    assert "test_board.py" in place and "in forward" in place
    assert "_call_impl" not in place
