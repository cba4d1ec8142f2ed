"""When every action of a step began and ended."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, field

from pipert.comm.transport import Transport
from pipert.scheduler.row import Codes
from pipert.scheduler.timeline import Timeline


@dataclass
class Timings:
    """One rank's actions of one step, in order.

    Attributes:
        codes: the packed actions.
        starts: seconds on this machine's monotonic clock. A computation starts when what it needs is there.
        ends: the same. A message's is when it was posted, a reduction's when its result was there.
        origin: the same clock when the header's exchange was over, which is nearly the same moment on all ranks.
    """

    codes: Codes
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    origin: float = 0.0


def gather(name: str, timings: Timings, transport: Transport) -> Timeline:
    """All ranks' timings of their last step as one timeline, on every rank; starts at 0.

    Ranks of one machine share a clock. Clocks of different machines are set against each other by the moment at which
    the step's header was exchanged, so they are right to a message's latency.
    """
    mine = [socket.gethostname(), timings.origin, timings.codes.tolist(), timings.starts, timings.ends]
    ranks = [json.loads(blob) for blob in transport.exchange(json.dumps(mine).encode())]
    one_machine = len({host for host, *_ in ranks}) == 1
    lanes = []
    for _, origin, codes, starts, ends in ranks:
        zero = 0.0 if one_machine else origin
        lanes.append((codes, [start - zero for start in starts], [end - zero for end in ends]))
    return Timeline.of(name, lanes).from_zero()
