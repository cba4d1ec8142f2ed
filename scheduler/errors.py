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


class UnsafeProgramError(ScheduleError, ValueError):
    """The verifier found faults; the message is the picture of the first ones."""
