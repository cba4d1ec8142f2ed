"""Everything that may go wrong on the local transport, as one value drawn from one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from pipert.comm.errors import OptionError


@dataclass(frozen=True)
class Faults:
    """A plan of delays and failures; the same plan gives the same faults whatever the timing of the threads.

    Ranks are those of the whole job, whatever group an operation is on. Counts start at 0.

    Attributes:
        seed: where every random draw below comes from.
        delay: the longest delay between the match of a message and its delivery; each message draws its own.
            Collectives, too, complete at another time on every rank.
        clock: what the delay is measured in. ``"virtual"`` costs no time: a message is held until every rank waits (or
            one polls), then the one with the least due time is delivered. ``"real"`` is in seconds.
        reorder: messages may overtake each other wherever MPI allows it: on the same pair of ranks, with another tag.
            Without it, a pair's messages are delivered in the order in which they were matched.
        stall: the longest sleep, in real seconds, in every ``Transport.report`` (that is before every action).
        drop: ``(source, dest, n)``: the n-th message from source to dest is lost. A buffered send completes all the
            same, a rendezvous send never does.
        drop_rate: the share of messages lost at random, besides.
        kill: ``(rank, n)``: the rank dies without a word when it starts its n-th operation.

    Raises:
        OptionError: a value is out of range.
    """

    seed: int = 0
    delay: float = 0.0
    clock: Literal["virtual", "real"] = "virtual"
    reorder: bool = False
    stall: float = 0.0
    drop: tuple[tuple[int, int, int], ...] = ()
    drop_rate: float = 0.0
    kill: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for name in ("delay", "stall"):
            if not getattr(self, name) >= 0:
                raise OptionError(f"{name} = {getattr(self, name)} is negative; use 0 for none")
        if self.clock not in ("virtual", "real"):
            raise OptionError(f"clock = {self.clock!r} is neither 'virtual' nor 'real'")
        if not 0 <= self.drop_rate <= 1:
            raise OptionError(f"drop_rate = {self.drop_rate} is not a share between 0 and 1")
        if self.reorder and not self.delay:
            raise OptionError("reorder = True without a delay changes nothing; give a delay, for example delay=1.0")
        if any(len(entry) != 3 for entry in self.drop):
            raise OptionError(f"drop = {self.drop} must hold (source, dest, n) triples")
        if any(len(entry) != 2 for entry in self.kill):
            raise OptionError(f"kill = {self.kill} must hold (rank, n) pairs")

    def check_ranks(self, size: int) -> None:
        """Check that the plan speaks of ranks that there are.

        Raises:
            OptionError: it names a rank outside ``0 <= rank < size``.
        """
        named = {rank for source, dest, _ in self.drop for rank in (source, dest)} | {rank for rank, _ in self.kill}
        if wrong := sorted(rank for rank in named if not 0 <= rank < size):
            raise OptionError(f"the fault plan names rank {wrong[0]}, but there are {size} ranks; use 0 to {size - 1}")

    def stream(self, *key: object) -> random.Random:
        """The random stream of one rank or pair: it depends on the seed and the key alone."""
        return random.Random(f"{self.seed}/{'/'.join(map(str, key))}")
