"""The transport interface: what every way of moving bytes between ranks offers.

A transport never blocks in ``isend``/``irecv``/``i*``: they start an operation and return a `Request`. Only
`Transport.wait` and the collectives without a leading ``i`` wait, and every wait has a deadline. While it waits, a rank
drives the progress of *all* its outstanding operations, so any order of waits is safe.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch


class Request(Protocol):
    """One operation under way. Its tensor must stay alive and (for a send) unchanged until it is done."""

    def test(self) -> bool:
        """Drive the operation a little and tell whether it is complete. Never blocks; true ever after."""
        ...


class Transport(ABC):
    """Point-to-point messages and collectives among ``size`` ranks.

    Attributes:
        rank: this rank, ``0 <= rank < size``.
        size: the number of ranks.
        tag_bound: tags are ``0 <= tag < tag_bound``.
        device: where the tensors are that it moves: this rank's GPU, or the CPU.
        semantics: what the verifier needs to know, as keyword arguments of ``pipert.scheduler.semantics.Semantics``.
    """

    rank: int
    size: int
    tag_bound: int
    device: torch.device = torch.device("cpu")
    semantics: Mapping[str, object]

    @abstractmethod
    def isend(self, tensor: torch.Tensor, dest: int, tag: int) -> Request:
        """Start sending a contiguous tensor (any dtype, any size, also empty) from its own memory."""

    @abstractmethod
    def irecv(self, tensor: torch.Tensor, source: int, tag: int) -> Request:
        """Start receiving into a contiguous tensor of exactly the sender's size in bytes."""

    @abstractmethod
    def iallreduce(self, tensor: torch.Tensor, op: str = "sum") -> Request:
        """Start reducing ``tensor`` in place over all ranks; ``op`` is ``"sum"`` or ``"max"``.

        The result is bitwise the same on every rank and in every run.
        """

    @abstractmethod
    def ireduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor) -> Request:
        """Start summing ``tensor`` (``size * out.numel()`` elements); rank r gets part r in ``out``."""

    @abstractmethod
    def iallgather(self, out: torch.Tensor, tensor: torch.Tensor) -> Request:
        """Start gathering every rank's ``tensor`` into ``out`` (``size * tensor.numel()`` elements), in rank order."""

    @abstractmethod
    def ibroadcast(self, tensor: torch.Tensor, root: int) -> Request:
        """Start copying root's ``tensor`` into everybody's."""

    @abstractmethod
    def exchange(self, blob: bytes) -> list[bytes]:
        """Give every rank everybody's blob, in rank order. Lengths may differ. Waits, under the deadline."""

    @abstractmethod
    def wait(self, request: Request, doing: object = "", peer: int | None = None) -> None:
        """Wait until the request is done, driving all outstanding operations meanwhile.

        Args:
            request: an operation started on this transport or on one split from it.
            doing: what the rank waits in, in schedule words; formatted with ``str`` only for a report.
            peer: the rank of this transport that owes the other half, when one is known.

        Raises:
            HangError: the deadline passed, or a deadlock was proved.
            JobAborted: another rank failed first.
        """

    @abstractmethod
    def progress(self) -> None:
        """Poll all outstanding operations once; raise `JobAborted` if another rank failed."""

    @abstractmethod
    def report(self, doing: object) -> None:
        """Note what this rank is doing now, for the hang reports of others. Cheap: called before every action."""

    @abstractmethod
    def split(self, color: int | None, key: int) -> Transport | None:
        """Make a sub-transport of the ranks that give the same color, ordered by key; None where color is None.

        Collective: every rank calls it, in the same order.
        """

    @abstractmethod
    def abort(self, error: BaseException) -> None:
        """Tell every rank that this one failed and why. Returns; the caller raises."""

    @abstractmethod
    def close(self) -> None:
        """Release what the transport holds. Idempotent."""

    @property
    def control(self) -> Transport:
        """Where sizes and other small messages of the host travel: the same ranks; this transport itself, mostly."""
        return self

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Make ready for messages between these pairs of ranks, before the first one. Collective, the same pairs.

        Most transports have nothing to make ready.
        """
        del pairs

    def group(self) -> AbstractContextManager[None]:
        """In which messages are collected that start together at its end, where the transport's semantics have groups.

        Elsewhere each starts at once. Inside, no operation of the group may be waited for.
        """
        return nullcontext()

    def __deepcopy__(self, memo: object) -> Transport:
        """The transport itself: a copy of a model whose layers communicate does so with the same ranks."""
        return self

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.exchange(b"")
