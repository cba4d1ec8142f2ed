"""Ranks of one machine wake one another."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from pipert.comm.board import Board
from pipert.comm.doorbell import Doorbells

pytestmark = pytest.mark.skipif(not Doorbells.supported(), reason="this machine has no futex that pipert can call")


@pytest.fixture
def bells(tmp_path: Path) -> tuple[Doorbells, Doorbells]:
    """Those of the ranks 4 and 6 of a world, as each of them sees them."""
    path = tmp_path / "x.board"
    Board.create(path, [4, 6])
    first, second = (Board.open(path, slot).doorbells() for slot in (0, 1))
    assert first is not None
    assert second is not None
    return first, second


def test_a_rank_is_seen_asleep_exactly_between_arming_and_waking(bells: tuple[Doorbells, Doorbells]) -> None:
    first, second = bells
    flag = second.flag(4)
    assert not second.asleep[flag]
    armed = first.arm()
    assert second.asleep[flag]
    first.sleep(armed, 1e-4)
    assert not second.asleep[flag]
    first.arm()
    first.disarm()
    assert not second.asleep[flag]
    assert not first.asleep[first.flag(6)]


def test_a_ring_after_arming_is_never_missed(bells: tuple[Doorbells, Doorbells]) -> None:
    first, second = bells
    armed = first.arm()
    second.ring(second.flag(4))
    first.sleep(armed, 3600.0)  # returns at once: the word has changed


def test_a_sleep_ends_by_itself(bells: tuple[Doorbells, Doorbells]) -> None:
    first, _ = bells
    for _ in range(3):
        first.sleep(first.arm(), 1e-3)


def test_a_ring_wakes_another_process(tmp_path: Path) -> None:
    path = tmp_path / "x.board"
    Board.create(path, [0, 1])
    sleeper = multiprocessing.get_context("spawn").Process(target=_sleep, args=(path,), daemon=True)
    sleeper.start()
    bells = Board.open(path, 0).doorbells()
    assert bells is not None
    while sleeper.is_alive():
        if bells.asleep[bells.flag(1)]:
            bells.ring(bells.flag(1))
        time.sleep(1e-3)
    assert sleeper.exitcode == 0


def _sleep(path: Path) -> None:
    bells = Board.open(path, 1).doorbells()
    assert bells is not None
    bells.sleep(bells.arm(), 3600.0)
    os._exit(0)


def test_a_rank_of_another_machine_looks_awake(bells: tuple[Doorbells, Doorbells]) -> None:
    first, second = bells
    second.arm()
    assert not first.asleep[first.flag(5)]
