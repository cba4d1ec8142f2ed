"""How long messages between neighbouring pipeline ranks take."""

from __future__ import annotations

import json
from dataclasses import dataclass
from time import perf_counter

import torch

from pipert.comm.transport import Transport

#: Messages there and back again; the fastest counts.
_ROUNDS = 5


@dataclass(frozen=True)
class Link:
    """The way from one rank to another.

    Attributes:
        latency: seconds of an empty message.
        per_byte: seconds that each byte adds.
    """

    latency: float = 0.0
    per_byte: float = 0.0

    def seconds(self, nbytes: int) -> float:
        """How long a message takes."""
        return self.latency + self.per_byte * nbytes


def measure_links(transport: Transport, nbytes: int, device: torch.device) -> tuple[Link, ...]:
    """Send messages there and back between each rank and the next one, from the last one to the first too.

    Every rank calls it; pairs take turns.

    Args:
        transport: the ranks of a pipeline.
        nbytes: the size of a typical message.
        device: where messages lie.

    Returns:
        the link from each rank to the next, the same on every rank.
    """
    transport.connect((rank, (rank + 1) % transport.size) for rank in range(transport.size))
    mine = Link()
    for first in range(transport.size if transport.size > 1 else 0):
        second = (first + 1) % transport.size
        if transport.rank in (first, second):
            empty, full = (_one_way(transport, first, second, size, device) for size in (1, max(2, nbytes)))
            if transport.rank == first:
                mine = Link(empty, max(0.0, full - empty) / max(1, nbytes))
    blobs = transport.exchange(json.dumps([mine.latency, mine.per_byte]).encode())
    return tuple(Link(*json.loads(blob)) for blob in blobs)


def _one_way(transport: Transport, first: int, second: int, nbytes: int, device: torch.device) -> float:
    memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    peer = second if transport.rank == first else first
    doing = f"a trial message of {nbytes} bytes between ranks {first} and {second}"

    def pass_on(sends: bool) -> None:
        request = transport.isend(memory, peer, 0) if sends else transport.irecv(memory, peer, 0)
        transport.wait(request, doing, peer)

    seconds = []
    for _ in range(_ROUNDS):
        start = perf_counter()
        for sends in (transport.rank == first, transport.rank != first):
            pass_on(sends)
        seconds.append((perf_counter() - start) / 2)
    return min(seconds)
