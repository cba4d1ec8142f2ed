"""Progress is a bar on a terminal and a few plain lines elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pipert.report.progress import Progress, _duration


class Clock:
    """Seconds that pass when told."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def lines_of(steps: int, seconds: float, done: int = 0) -> list[str]:
    out, clock = io.StringIO(), Clock()
    with Progress(Console(file=out, width=40), steps, done, every=10, clock=clock) as progress:
        for step in range(done + 1, steps + 1):
            clock.now += seconds
            progress.update(step, {"loss": f"{1 / step:.2f}", "[x]": "[y]"})
    return out.getvalue().splitlines()


def test_lines_come_now_and_then_with_the_time_left_and_one_at_the_end() -> None:
    lines = lines_of(steps=100, seconds=1.0)
    assert lines[0] == "step   1/100  loss 1.00  [x] [y]  1:39 left"
    assert lines[1] == "step  11/100  loss 0.09  [x] [y]  1:29 left"
    assert lines[-1] == "step 100/100  loss 0.01  [x] [y]  1:40"
    assert len(lines) == 11


def test_a_run_that_goes_on_counts_its_own_time_only() -> None:
    lines = lines_of(steps=100, seconds=1.0, done=90)
    assert lines[0] == "step  91/100  loss 0.01  [x] [y]  9 s left"


def test_slow_steps_have_a_line_each() -> None:
    assert len(lines_of(steps=3, seconds=20.0)) == 3


def test_a_terminal_gets_a_bar_and_notes_stay_above_it() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, _environ={"TERM": "xterm"})
    with Progress(console, 10) as progress:
        progress.update(3, {"loss": "2.50"})
        progress.note("evaluated [not markup]")
    text = out.getvalue()
    assert "3/10" in text and "loss 2.50" in text and "evaluated [not markup]" in text
    assert "\x1b[" in text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (41.2, "41 s"), (59.6, "1:00"), (187, "3:07"), (7500, "2:05:00")]
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert _duration(seconds) == text
