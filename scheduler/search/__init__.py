"""Search: the schedule with the least makespan for given costs, memory and transport."""

from __future__ import annotations

from pipert.scheduler.search.found import Found
from pipert.scheduler.search.search import search

__all__ = ["Found", "search"]
