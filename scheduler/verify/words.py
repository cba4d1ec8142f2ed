"""Words that rules and pictures share."""

from __future__ import annotations


def count(number: int, noun: str) -> str:
    """A number with its noun: ``1 message``, ``12 messages``."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"
