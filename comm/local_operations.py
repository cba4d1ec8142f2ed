"""What the ranks of a local job start: sends, receives and collectives under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class Group:
    """Who a transport joins: an identity that is equal on all its ranks, and their numbers in the whole job."""

    key: tuple[object, ...]
    ranks: tuple[int, ...]


class Driver(Protocol):
    """What moves operations on when a rank polls."""

    def poll(self, rank: int) -> None:
        """Deliver what is due; raise what ended the job, if anything did."""
        ...


@dataclass(eq=False, slots=True, kw_only=True)
class Operation:
    """An operation of one rank; also the `Request` that the rank holds.

    Attributes:
        rank: whose it is, in the whole job.
        unit: itself and what it was issued with as a group, from its posting to its end.
        active: its unit has started.
        over: it could be complete, were it alone.
        queue: its channel, where channels are queues.
    """

    driver: Driver = field(repr=False)
    group: Group
    rank: int
    unit: tuple[Operation, ...] = field(default=(), repr=False)
    done: bool = False
    active: bool = False
    over: bool = False
    queue: deque[Operation] | None = field(default=None, repr=False)

    def test(self) -> bool:
        """Drive the job a little and tell whether this operation is complete. Never blocks."""
        if not self.done:
            self.driver.poll(self.rank)
        return self.done

    def describe(self) -> str:
        """What it is and what it stands behind, for reports; ranks are those of the whole job."""
        if self.queue and self.queue[0].unit is not self.unit:
            return f"{self.name()}, queued behind {self.queue[0].describe()}"
        others = [other.name() for other in self.unit if other is not self and not other.over]
        return self.name() + (f", in one group with {' and '.join(others)}" if others else "")

    def name(self) -> str:
        """What it is."""
        raise NotImplementedError


@dataclass(eq=False, slots=True, kw_only=True)
class Send(Operation):
    """A message to ``peer`` (numbered in the whole job).

    Attributes:
        memory: the sender's bytes; once a buffered send is complete, a copy of them.
        delay: drawn from the fault plan, as is ``lost``.
    """

    peer: int
    tag: int
    memory: torch.Tensor = field(repr=False)
    delay: float = 0.0
    lost: bool = False

    def name(self) -> str:
        """What it is."""
        return f"send to rank {self.peer}, tag {self.tag}" + (" (lost by the fault plan)" if self.lost else "")


@dataclass(eq=False, slots=True, kw_only=True)
class Receive(Operation):
    """A message from ``peer`` (numbered in the whole job) into ``memory``."""

    peer: int
    tag: int
    memory: torch.Tensor = field(repr=False)

    def name(self) -> str:
        """What it is."""
        return f"receive from rank {self.peer}, tag {self.tag}"


@dataclass(eq=False, slots=True, kw_only=True)
class Collective(Operation):
    """One rank's part in a collective.

    Attributes:
        kind: ``allreduce``, ``exchange`` and so on.
        signature: what must be equal on all ranks.
        given: what this rank contributes: a tensor, read when the last rank has come, or a Python object.
        target: the tensor the result is copied into, if any.
        combine: from the contributions in rank order to a result per rank, in fresh memory.
        result: what ``combine`` made for this rank.
        number: the how-manieth collective of this rank on its group.
        gathered: the parts of the ranks that have come, by rank; shared by all of them.
    """

    kind: str
    signature: str
    given: Any = field(repr=False)
    target: torch.Tensor | None = field(default=None, repr=False)
    combine: Callable[[list[Any]], Sequence[Any]] = field(repr=False)
    result: Any = field(default=None, repr=False)
    number: int = 0
    delay: float = 0.0
    gathered: dict[int, Collective] = field(default_factory=dict, repr=False)

    def name(self) -> str:
        """What it is and who is missing."""
        missing = [str(rank) for rank in self.group.ranks if rank not in self.gathered]
        there = f", not yet entered by rank {', '.join(missing)}" if missing else ""
        return f"{self.kind} (collective {self.number} of ranks {list(self.group.ranks)}){there}"
