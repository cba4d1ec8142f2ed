"""The waiting loop and the collectives it drives."""

from __future__ import annotations

import time

import pytest

from pipert.comm.errors import OptionError
from pipert.comm.wait import Collective, Progress, Steps, WaitPolicy, wait_until


class Flag:
    """A request that is done when somebody says so."""

    def __init__(self, done: bool = False) -> None:
        self.done, self.tests = done, 0
        self.peer = 3

    def test(self) -> bool:
        self.tests += 1
        return self.done


def test_a_wait_that_lasts_costs_little_of_the_core() -> None:
    end = time.monotonic() + 0.5
    begin = time.process_time()
    wait_until(lambda: time.monotonic() > end, WaitPolicy(), lambda waited: None)
    assert time.process_time() - begin < 0.25
    assert time.monotonic() - end < 0.1


def test_a_sleep_is_a_small_share_of_the_time_waited() -> None:
    waits: list[float] = []

    def check(waited: float) -> None:
        waits.append(waited)
        if waited > 0.2:
            raise TimeoutError

    policy = WaitPolicy(spins=1, yielding=0.0, shortest=1e-4, longest=1.0, share=0.05)
    with pytest.raises(TimeoutError):
        wait_until(lambda: False, policy, check)
    assert len(waits) > 30  # each step 5 per cent longer: not 2000 steps of 0.1 ms, not one of 0.2 s
    assert len(waits) < 1000


def test_the_check_is_called_while_the_core_is_never_given_away_too() -> None:
    def check(waited: float) -> None:
        if waited > 0.01:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        wait_until(lambda: False, WaitPolicy.dedicated(), check)


def test_ranks_that_outnumber_the_cores_poll_less() -> None:
    assert WaitPolicy.shared(16, 2).spins < WaitPolicy.shared(2, 2).spins
    assert WaitPolicy.shared(16, 2).yielding < WaitPolicy.shared(2, 2).yielding


def test_the_environment_chooses_how_to_wait() -> None:
    assert WaitPolicy.from_environment(1, {"PIPERT_WAIT": "spin"}) == WaitPolicy.dedicated()
    assert (
        WaitPolicy.from_environment(1, {}) == WaitPolicy.from_environment(1, {"PIPERT_WAIT": "yield"}) == WaitPolicy()
    )
    with pytest.raises(OptionError, match="PIPERT_WAIT = 'sleep' is not a way to wait; use 'yield' or 'spin'"):
        WaitPolicy.from_environment(1, {"PIPERT_WAIT": "sleep"})


def test_a_collective_goes_on_only_when_its_message_is_done_and_stays_done() -> None:
    first, second = Flag(), Flag()
    trail: list[str] = []

    def steps() -> Steps:
        yield first
        trail.append("first")
        yield second
        trail.append("second")

    collective = Collective(steps())
    assert not collective.test() and collective.peer == 3 and trail == []
    first.done = True
    assert not collective.test() and trail == ["first"]
    second.done = True
    assert collective.test() and collective.done and collective.peer is None
    tests = first.tests + second.tests
    assert collective.test() and first.tests + second.tests == tests


def test_one_poll_drives_every_collective_and_drops_the_finished_ones() -> None:
    flags = [Flag(), Flag(), Flag(done=True)]

    def steps(flag: Flag) -> Steps:
        yield flag

    progress = Progress()
    collectives = [progress.start(steps(flag)) for flag in flags]
    assert [collective.done for collective in collectives] == [False, False, True] and len(progress) == 2
    flags[1].done = True
    progress.poll()
    assert [collective.done for collective in collectives] == [False, True, True] and len(progress) == 1
