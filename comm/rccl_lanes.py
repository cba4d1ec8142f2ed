"""Lanes: a communicator with the stream on which its operations follow one another, and how operations are started."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipert.comm.errors import TransportError
from pipert.comm.rccl_library import Library
from pipert.comm.rccl_streams import Stream, make_stream, on_device


class Lane:
    """A communicator and its stream. Operations run in the order in which they are started, one after another."""

    def __init__(self, library: Library, place: Any, device: torch.device) -> None:
        """Own a communicator that may still be in the making; ``place`` is where the library puts its handle."""
        self.library, self.device = library, device
        self._place = place
        self._stream: Stream | None = None

    @property
    def comm(self) -> Any:
        """The communicator.

        Raises:
            TransportError: it is gone.
        """
        if self._place is None:
            raise TransportError("an RCCL communicator is used after it was closed, or ended because the job failed")
        return self._place[0]

    @property
    def made(self) -> bool:
        """Whether the communicator has its handle; if so it may still have to get ready."""
        return bool(self.comm != self.library.ffi.NULL)

    @property
    def stream(self) -> Stream:
        """The stream; made for the first operation."""
        if self._stream is None:
            self._stream = make_stream(self.library, self.device)
        return self._stream

    def finalize(self) -> None:
        """Before `close`, on all its ranks: what is under way is completed, in the background."""
        self.library.call("ncclCommFinalize", self.comm)

    def close(self, how: str = "ncclCommDestroy") -> None:
        """Give the communicator back; with ``ncclCommAbort`` also end what can never be complete. Idempotent."""
        place, self._place = self._place, None
        if place is not None and place[0] != self.library.ffi.NULL:
            getattr(self.library.functions, how)(place[0])


class RcclRequest:
    """An operation under way. Keeps its tensors alive until it is complete."""

    __slots__ = ("_finish", "_holds", "_lane", "_over")

    def __init__(self, lane: Lane, holds: object, finish: Callable[[], object] | None) -> None:
        """Not started yet; see `begin`."""
        self._lane, self._holds, self._finish = lane, holds, finish
        self._over: Callable[[], bool] | None = None

    @property
    def started(self) -> bool:
        """False while its group is open."""
        return self._over is not None

    def begin(self, over: Callable[[], bool]) -> None:
        """It was started; ``over`` tells whether its stream is past it."""
        self._over = over

    def test(self) -> bool:
        """Whether it is complete. Does not block.

        Raises:
            RcclError: it failed.
            TransportError: it was ended because the job failed.
        """
        if self._holds is None:
            return True
        over = self._over is not None and self._over()
        self._lane.library.ready(self._lane.comm)  # a stream gets past a failed operation, too
        if not over:
            return False
        if self._finish is not None:
            self._finish()
        self._holds = self._finish = None
        return True


@dataclass(frozen=True)
class Operation:
    """An operation to be started.

    Attributes:
        lane: where.
        function: its name in the library.
        arguments: what that takes, up to communicator and stream.
        tensors: what it reads and writes.
        request: what the caller holds.
    """

    lane: Lane
    function: str
    arguments: tuple[Any, ...]
    tensors: Sequence[torch.Tensor]
    request: RcclRequest


class Settling:
    """What goes on in the background of lanes, as a request: communicators being made, operations being started.

    A lane's part comes behind it: until the lane is ready, its part has no handle.
    """

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = lanes

    def test(self) -> bool:
        """Whether it is over. Raises what went wrong there."""
        return all(lane.made and lane.library.ready(lane.comm) for lane in self._lanes)


def launch(operations: Sequence[Operation], settle: Callable[[Sequence[Lane]], None]) -> None:
    """Start operations together, in one group call.

    Args:
        operations: of one library and device.
        settle: waits for what goes on in the background of lanes.

    Raises:
        RcclError: the library refuses.
    """
    by_lane: dict[Lane, list[Operation]] = {}
    for operation in operations:
        by_lane.setdefault(operation.lane, []).append(operation)
    for lane, own in by_lane.items():
        lane.stream.follow(tensor for operation in own for tensor in operation.tensors)
    first = operations[0].lane
    with on_device(first.device):
        first.library.call("ncclGroupStart")
        try:
            for each in operations:
                each.lane.library.call(each.function, *each.arguments, each.lane.comm, each.lane.stream.pointer)
        except BaseException:
            first.library.functions.ncclGroupEnd()  # fails for the same reason
            raise
        settled = first.library.call("ncclGroupEnd")
    if not settled:
        settle(list(by_lane))
    for lane, own in by_lane.items():
        over = lane.stream.mark()
        for operation in own:
            operation.request.begin(over)
