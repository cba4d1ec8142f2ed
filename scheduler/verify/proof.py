"""Proof: the verifier's answer as a value."""

from __future__ import annotations

from dataclasses import dataclass

from pipert.scheduler.errors import UnsafeProgramError
from pipert.scheduler.program import Program
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.verify.fault import Check, Fault
from pipert.scheduler.verify.picture import picture, statement


@dataclass(frozen=True)
class Proof:
    """What the verifier found about a schedule or program.

    Printing it gives a short statement of what is proved, or the picture of the first fault: the actions around it
    with an arrow at the culprit and, for a deadlock, the shortest cycle of waits in words.

    Attributes:
        target: what was verified.
        faults: the broken rules, most basic first (of each rule at most `verifier.MAX_FAULTS`).
        checks: the rules that hold. A rule that could not be judged, because one it builds on is broken, is in neither.
    """

    target: Schedule | Program
    faults: tuple[Fault, ...]
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether the target is safe."""
        return not self.faults

    def require(self) -> Proof:
        """Return the proof, or refuse.

        Raises:
            UnsafeProgramError: there are faults; the message is the picture.
        """
        if not self.ok:
            raise UnsafeProgramError(str(self))
        return self

    def __str__(self) -> str:
        return statement(self.target, self.checks) if self.ok else picture(self.target, self.faults)
