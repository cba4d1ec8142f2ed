"""Pictures of schedules and timelines: as text for a terminal, as SVG for a page."""

from __future__ import annotations

from pipert.scheduler.draw.svg import svg
from pipert.scheduler.draw.text import text

__all__ = ["svg", "text"]
