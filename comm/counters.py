"""How many messages and bytes a rank has started on one transport."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Counters:
    """Counts by kind: ``send``, ``receive``, ``broadcast``, ``exchange``, ``split`` or a collective's other name.

    Attributes:
        messages: operations started.
        bytes: bytes in this rank's own (larger) tensor of those operations.
    """

    messages: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def record(self, kind: str, nbytes: int) -> None:
        """Count one operation."""
        self.messages[kind] += 1
        self.bytes[kind] += nbytes
