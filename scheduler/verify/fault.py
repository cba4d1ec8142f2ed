"""Faults and checks: what the verifier's rules answer."""

from __future__ import annotations

from dataclasses import dataclass

from pipert.scheduler.action import Action


@dataclass(frozen=True)
class Fault:
    """One broken rule and where.

    Attributes:
        rule: the rule's short name, for example ``deadlock``.
        message: what is wrong, in words.
        rank: the rank at fault; None if no single rank is.
        index: where in the rank's row; None if an action is missing.
        action: the action at fault (for a missing one: the action that should be there).
        along: the (rank, index) of every action that takes part, for example in a cycle of waits.
    """

    rule: str
    message: str
    rank: int | None = None
    index: int | None = None
    action: Action | None = None
    along: tuple[tuple[int, int], ...] = ()

    @property
    def place(self) -> str:
        """Rank, index and action, as far as there are any."""
        parts = [f"rank {self.rank}"] if self.rank is not None else []
        parts += [f"action {self.index}"] if self.index is not None else []
        return ", ".join(parts) + (f" ({self.action})" if self.action is not None else "")

    def __str__(self) -> str:
        place = f" at {self.place}" if self.place else ""
        return f"{self.rule}{place}: {self.message}"


@dataclass(frozen=True)
class Check:
    """One rule that holds: its short name, and what that means in one sentence."""

    rule: str
    statement: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.statement}"
