"""The verifier: proves a schedule or a program safe for its transport, or shows why it is not."""

from __future__ import annotations

from pipert.scheduler.verify.fault import Check, Fault
from pipert.scheduler.verify.proof import Proof
from pipert.scheduler.verify.verifier import verify

__all__ = ["Check", "Fault", "Proof", "verify"]
