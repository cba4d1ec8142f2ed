"""Errors of the scheduler. Each names the values, the rule and the remedy."""

from __future__ import annotations


class ScheduleError(Exception):
    """Base of every error that the scheduler raises on purpose."""


class ActionError(ScheduleError, ValueError):
    """A text or a number is not an action."""


class FormatError(ScheduleError, ValueError):
    """A schedule file cannot be read."""


class LayoutError(ScheduleError, ValueError):
    """Ranks, chunks and micro-batches for which a generator has no schedule."""


class SemanticsError(ScheduleError, ValueError):
    """Message rules that no transport has."""


class CostError(ScheduleError, ValueError):
    """Costs that are no durations, or that do not fit the stages."""


class TimelineError(ScheduleError, ValueError):
    """Rows or a file that are no timeline, or timelines that cannot be compared."""


class UnsafeProgramError(ScheduleError, ValueError):
    """The verifier found faults; the message is the picture of the first ones."""


class DeadlockError(UnsafeProgramError):
    """Actions wait for one another in a cycle; the message names them."""
