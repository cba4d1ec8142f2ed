"""How far a run is: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Progress:
    """Shows the step, figures and the time left. Use it on one rank.

    Args:
        console: where to; `rich.console.Console` knows whether it is a terminal.
        steps: how many there will be.
        done: how many there were before, in a run that goes on.
        every: off a terminal: seconds between lines, at least; the first and the last step have one always.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        console: Console,
        steps: int,
        done: int = 0,
        *,
        every: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console
        self.steps = steps
        self._first = done
        self._every = every
        self._clock = clock
        self._begin = clock()
        self._last_line = -float("inf")
        self._bar: Bar | None = None
        if console.is_terminal:
            columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"))
            self._bar = Bar(*columns, TimeRemainingColumn(), TextColumn("left"), console=console)
            self._task = self._bar.add_task("steps", total=steps, completed=done, figures="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, figures: Mapping[str, str]) -> None:
        """Say that ``done`` steps are done.

        Args:
            done: how many.
            figures: name and value of what to show, such as ``{"loss": "2.31"}``.
        """
        text = "  ".join(f"{name} {value}" for name, value in figures.items())
        if self._bar is not None:
            self._bar.update(self._task, completed=done, figures=text)
            return
        now = self._clock()
        if done < self.steps and now - self._last_line < self._every:
            return
        self._last_line = now
        each = (now - self._begin) / max(1, done - self._first)
        left = f"{_duration(each * (self.steps - done))} left" if done < self.steps else _duration(now - self._begin)
        self.note(f"step {done:>{len(str(self.steps))}}/{self.steps}  {text}  {left}")

    def note(self, text: str) -> None:
        """Show a line that stays, above the bar."""
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)


def _duration(seconds: float) -> str:
    """Seconds for people: ``41 s``, ``3:07``, ``2:05:00``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
