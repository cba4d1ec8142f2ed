"""The waiting loop and the collectives it drives."""

from __future__ import annotations

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


class Clock:
    """Time that passes only in sleeps, as `Nap` and as the module ``time``."""

    def __init__(self) -> None:
        self.now = 0.0
        self.naps: list[float] = []
        self.calls: list[str] = []

    def monotonic(self) -> float:
        return self.now

    def arm(self) -> int:
        self.calls.append("arm")
        return len(self.naps)

    def sleep(self, armed: int, seconds: float) -> None:
        assert armed == len(self.naps)
        self.calls.append("sleep")
        self.naps.append(seconds)
        self.now += seconds

    def disarm(self) -> None:
        self.calls.append("disarm")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("pipert.comm.wait.time", clock)
    return clock


def test_a_sleep_is_a_small_share_of_the_time_waited(clock: Clock) -> None:
    policy = WaitPolicy(spins=1, yielding=0.0, shortest=1e-4, longest=5e-3, share=0.05)
    wait_until(lambda: clock.now > 0.5, policy, lambda waited: None, clock)
    waited = 0.0
    for nap in clock.naps:
        assert nap == pytest.approx(min(5e-3, max(1e-4, 0.05 * waited)))
        waited += nap
    assert len(clock.naps) < 250  # a long wait costs few polls


def test_what_is_done_after_arming_is_seen_before_the_sleep(clock: Clock) -> None:
    """A message that comes between the last poll and the arming rings no bell; the poll after it must see it."""
    policy = WaitPolicy(spins=1, yielding=0.0)
    wait_until(lambda: "arm" in clock.calls, policy, lambda waited: None, clock)
    assert clock.calls == ["arm", "disarm"]


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
