"""When every action of a step began and ended."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, field

from pipert.scheduler.row import Codes


@dataclass
class Timings:
    """One rank's actions of one step, in order.

    Attributes:
        codes: the packed actions.
        starts: seconds on this rank's monotonic clock. Waiting for what a computation needs comes before its start.
        ends: the same; of a reduction, when its result was there.
        origin: the same clock when the header's exchange was over, which is nearly the same moment on all ranks.
    """

    codes: Codes
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    origin: float = 0.0

    def encode(self) -> bytes:
        """As JSON, with the name of the machine."""
        fields = [socket.gethostname(), self.origin, self.codes.tolist(), self.starts, self.ends]
        return json.dumps(fields).encode()
