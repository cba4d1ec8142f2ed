"""Proves and simulates every generator on 1-16 ranks, with 1-40 micro-batches, and its programs for three transports.

* ``layouts``, ``programs``, ``actions``: how many were proved. ``unsafe``: how many were not, of which none may be.

One layout in ten, unless ``--all`` asks for all 10,880 (a quarter of an hour). Nothing is timed.

The last line is one JSON object with figures, bars and whether they hold; the exit code says the same.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from _verdicts import conclude, named

from pipert.scheduler.errors import ScheduleError
from tests.scheduler.every_layout import TRANSPORTS, layouts, prove

#: What has to hold.
BARS: dict[str, tuple[str, float]] = {"unsafe": ("at most", 0.0)}


def main() -> int:
    chosen = layouts()[:: 1 if "--all" in sys.argv[1:] else 10]
    actions = unsafe = 0
    for layout in chosen:
        try:
            actions += prove(layout)
        except (ScheduleError, AssertionError) as error:
            unsafe += 1
            print(f"{layout}\n{error}", flush=True)
    proved = len(chosen) - unsafe
    figures = {"layouts": proved, "programs": proved * len(TRANSPORTS), "actions": actions, "unsafe": unsafe}
    return conclude("every_layout", figures, named(figures, BARS, "{:10} {:12,}"))


if __name__ == "__main__":
    sys.exit(main())
