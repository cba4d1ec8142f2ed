"""The one log of a run: rank 0 writes metrics and shows progress, the other ranks are silent."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Self

from rich.console import Console

from pipert.report.earlier import keep_earlier
from pipert.report.metrics import MetricsWriter, Value
from pipert.report.progress import Progress


class RunLog:
    """Metrics and progress of a run; on other ranks than the first every method does nothing.

    What an earlier run left in the folder is moved aside first, and the progress says where to.

    Args:
        lead: whether this is the rank that writes.
        console: where progress goes.
        path: the file of metrics.
        steps: how many there will be.
    """

    def __init__(self, lead: bool, console: Console, path: Path, steps: int) -> None:
        self.lead = lead
        self.path = path
        self._stack = ExitStack()
        if lead:
            kept = keep_earlier(path.parent)
            self._metrics = self._stack.enter_context(MetricsWriter(path))
            self._progress = self._stack.enter_context(Progress(console, steps))
            if kept is not None:
                self._progress.note(f"results of an earlier run are kept in {kept}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def step(self, done: int, record: dict[str, Value], figures: dict[str, str]) -> None:
        """Log a step: the record as a line of metrics, the figures beside the progress."""
        if self.lead:
            self._metrics.write({"event": "step", "step": done, **record})
            self._progress.update(done, figures)

    def event(self, name: str, record: dict[str, Value], note: str = "") -> None:
        """Log something else, with a line that stays on the screen."""
        if self.lead:
            self._metrics.write({"event": name, **record})
            if note:
                self._progress.note(note)
