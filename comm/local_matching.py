"""Which messages meet, and when they arrive: the rules of the local transport, without its threads."""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

from pipert.comm.errors import MessageError, OptionError
from pipert.comm.faults import Faults
from pipert.comm.local_operations import Collective, Operation, Receive, Send

_Waiting = TypeVar("_Waiting", Send, Receive)


@dataclass(frozen=True)
class Rules:
    """The message rules of a local job; `pipert.scheduler.semantics.Semantics` says what the words mean.

    Raises:
        OptionError: a value that is none of those offered.
    """

    buffered: bool = False
    blocking: bool = False
    matching: Literal["tag", "order"] = "tag"
    channel: Literal["message", "pair", "direction", "rank"] = "message"
    grouped: bool = False
    tag_bound: int = 32768

    def __post_init__(self) -> None:
        for name, offered in (("matching", ("tag", "order")), ("channel", ("message", "pair", "direction", "rank"))):
            if getattr(self, name) not in offered:
                raise OptionError(f"{name} = {getattr(self, name)!r} is unknown; use one of {', '.join(offered)}")
        if self.tag_bound < 1:
            raise OptionError(f"tag_bound = {self.tag_bound} leaves no tag; use 1 or more")


class Matching:
    """All operations of a job and the one step that each event takes. Not thread-safe: its owner holds a lock.

    An operation is *posted*, becomes *active* when those before it in its channel are complete, *meets* its other
    half, and is *delivered*: at once, or after the delay that the fault plan draws. A message's bytes are read when it
    is delivered (rendezvous) or when its send becomes active (buffered). A collective meets when its last rank is
    active. Operations that are posted as a group become active together and are complete together.
    """

    def __init__(self, rules: Rules, faults: Faults, on_done: Callable[[Operation], None]) -> None:
        self._rules = rules
        self._faults = faults
        self._on_done = on_done
        self._dropped = frozenset(faults.drop)
        self._queues: dict[tuple[object, ...], deque[Operation]] = {}
        self._ready: deque[tuple[Operation, ...]] = deque()
        self._sends: dict[tuple[object, ...], deque[Send]] = {}
        self._receives: dict[tuple[object, ...], deque[Receive]] = {}
        self._gathered: dict[tuple[object, ...], dict[int, Collective]] = {}
        self._entered: dict[tuple[object, ...], int] = {}
        self._sent: dict[tuple[int, int], int] = {}
        self._streams: dict[tuple[object, ...], random.Random] = {}
        self._now = 0.0
        self._order = itertools.count()
        self._latest: dict[tuple[object, ...], float] = {}
        self._deliveries: list[tuple[float, int, Callable[[], None]]] = []

    # ---- posting ---------------------------------------------------------------------------------------------------

    def post(self, *unit: Operation) -> None:
        """Take in an operation, or several of one rank as a group, and do all that follows from it.

        Raises:
            MessageError: it meets one that does not fit. The job cannot go on after that.
        """
        for operation in unit:
            operation.unit = unit
            if isinstance(operation, Send):
                self._draw_faults(operation)
            elif isinstance(operation, Collective):
                self._number(operation)
            key = self._channel(operation)
            if key is not None:
                operation.queue = self._queues.setdefault(key, deque())
                operation.queue.append(operation)
        self._ready.append(unit)
        self._start_ready()

    def _draw_faults(self, send: Send) -> None:
        pair = (send.rank, send.peer)
        count = self._sent.get(pair, 0)
        self._sent[pair] = count + 1
        stream = self._stream("message", *pair)
        lost_at_random = self._faults.drop_rate > 0 and stream.random() < self._faults.drop_rate
        send.lost = lost_at_random or (*pair, count) in self._dropped
        send.delay = stream.uniform(0, self._faults.delay) if self._faults.delay else 0.0

    def _number(self, collective: Collective) -> None:
        key = (collective.group.key, collective.rank)
        collective.number = self._entered.get(key, 0)
        self._entered[key] = collective.number + 1
        if self._faults.delay:
            collective.delay = self._stream("collective", collective.rank).uniform(0, self._faults.delay)

    def _stream(self, *key: object) -> random.Random:
        if key not in self._streams:
            self._streams[key] = self._faults.stream(*key)
        return self._streams[key]

    def _channel(self, operation: Operation) -> tuple[object, ...] | None:
        channel = self._rules.channel
        own = (operation.group.key, operation.rank)
        if channel == "rank":
            return own
        if channel == "message" or not isinstance(operation, Send | Receive):
            return None
        return (*own, operation.peer) if channel == "pair" else (*own, operation.peer, type(operation))

    def _start_ready(self) -> None:
        while self._ready:
            unit = self._ready.popleft()
            if unit[0].active or not all(one.queue is None or one.queue[0].unit is unit for one in unit):
                continue
            for operation in unit:
                operation.active = True
            for operation in unit:
                if isinstance(operation, Send):
                    self._start_send(operation)
                elif isinstance(operation, Receive):
                    self._start_receive(operation)
                elif isinstance(operation, Collective):
                    self._start_collective(operation)

    def _start_send(self, send: Send) -> None:
        if self._rules.buffered:
            send.memory = send.memory.clone()
            self._finish(send)
        if not send.lost:
            key = self._match_key(send, send.rank, send.peer)
            receive = _pop(self._receives, key)
            if receive is None:
                self._sends.setdefault(key, deque()).append(send)
            else:
                self._meet(send, receive, key)

    def _start_receive(self, receive: Receive) -> None:
        key = self._match_key(receive, receive.peer, receive.rank)
        send = _pop(self._sends, key)
        if send is None:
            self._receives.setdefault(key, deque()).append(receive)
        else:
            self._meet(send, receive, key)

    def _match_key(self, operation: Send | Receive, source: int, dest: int) -> tuple[object, ...]:
        pair = (operation.group.key, source, dest)
        return (*pair, operation.tag) if self._rules.matching == "tag" else pair

    def _start_collective(self, collective: Collective) -> None:
        key = (collective.group.key, collective.number)
        gathered = self._gathered.setdefault(key, {})
        for other in gathered.values():
            if other.signature != collective.signature:
                raise MessageError(
                    f"collective {collective.number} of ranks {list(collective.group.ranks)} differs: "
                    f"rank {other.rank} is in {other.signature}, rank {collective.rank} in {collective.signature}; "
                    "every rank must start the same collectives in the same order"
                )
        gathered[collective.rank] = collective
        collective.gathered = gathered
        if len(gathered) == len(collective.group.ranks):
            del self._gathered[key]
            self._combine([gathered[rank] for rank in collective.group.ranks])

    # ---- meeting and delivery --------------------------------------------------------------------------------------

    def _meet(self, send: Send, receive: Receive, key: tuple[object, ...]) -> None:
        if send.memory.numel() != receive.memory.numel():
            raise MessageError(
                f"rank {send.rank} sends {send.memory.numel()} bytes (tag {send.tag}) where rank {receive.rank} "
                f"receives {receive.memory.numel()} bytes (tag {receive.tag}), matched by {self._rules.matching}; "
                "both sides must give the same size"
            )
        pair = key if self._faults.reorder else (send.rank, send.peer)
        self._deliver_after(send.delay, pair, partial(self._deliver, send, receive))

    def _combine(self, parts: list[Collective]) -> None:
        try:
            results = parts[0].combine([part.given for part in parts])
        except RuntimeError as error:
            raise MessageError(f"{parts[0].describe()} cannot be computed: {error}") from error
        for part, result in zip(parts, results, strict=True):
            part.result = result
            self._deliver_after(part.delay, ("collective", part.rank, part.group.key), partial(self._hand_out, part))

    def _deliver_after(self, delay: float, line: tuple[object, ...], deliver: Callable[[], None]) -> None:
        if not self._faults.delay:
            deliver()
            return
        now = self._now if self._faults.clock == "virtual" else time.monotonic()
        due = max(now + delay, self._latest.get(line, 0.0))
        self._latest[line] = due
        heapq.heappush(self._deliveries, (due, next(self._order), deliver))

    def _deliver(self, send: Send, receive: Receive) -> None:
        receive.memory.copy_(send.memory)
        del receive.memory, send.memory  # a request that its rank still holds keeps no tensor alive
        self._finish(receive)
        if not send.over:
            self._finish(send)

    def _hand_out(self, part: Collective) -> None:
        if part.target is not None:
            part.target.copy_(part.result)
            part.result = part.target = None
        part.given = None
        self._finish(part)

    def _finish(self, operation: Operation) -> None:
        operation.over = True
        unit = operation.unit
        if not all(one.over for one in unit):
            return
        for one in unit:
            one.done, one.unit = True, ()  # else it would keep itself alive
            self._on_done(one)
            if one.queue is not None:
                one.queue.popleft()
                if one.queue and one.queue[0].unit is not unit:
                    self._ready.append(one.queue[0].unit)

    # ---- time ------------------------------------------------------------------------------------------------------

    def next_due(self) -> float | None:
        """The real time of the next delivery, when deliveries happen in real time and one is under way."""
        return self._deliveries[0][0] if self._deliveries and self._faults.clock == "real" else None

    def under_way(self) -> bool:
        """Whether something that has met waits for its delivery."""
        return bool(self._deliveries)

    def deliver_next(self) -> None:
        """Make the next delivery now, whatever the clock says; the virtual clock moves on to it.

        Raises:
            MessageError: as in `post`.
        """
        self._now, _, deliver = heapq.heappop(self._deliveries)
        deliver()
        self._start_ready()

    def deliver_due(self) -> None:
        """Make the deliveries whose real time has come.

        Raises:
            MessageError: as in `post`.
        """
        while (due := self.next_due()) is not None and due <= time.monotonic():
            self.deliver_next()

    # ---- reports ---------------------------------------------------------------------------------------------------

    def offered(self, receive: Receive) -> str:
        """What the peer of a receive has sent to the same rank that no receive has matched, for reports."""
        tags = [
            str(send.tag)
            for sends in self._sends.values()
            for send in sends
            if (send.group, send.rank, send.peer) == (receive.group, receive.peer, receive.rank)
        ]
        return f" (rank {receive.peer} offers tag {', '.join(tags)})" if tags else ""

    def leftovers(self) -> list[str]:
        """Describe each operation that has not met its other half."""
        waiting: list[Operation] = [send for sends in self._sends.values() for send in sends]
        waiting += [receive for receives in self._receives.values() for receive in receives]
        waiting += [part for gathered in self._gathered.values() for part in gathered.values()]
        waiting += [operation for queue in self._queues.values() for operation in queue if not operation.active]
        return [f"rank {operation.rank}: {operation.describe()}" for operation in waiting]


def _pop(waiting: dict[tuple[object, ...], deque[_Waiting]], key: tuple[object, ...]) -> _Waiting | None:
    """Take the first of a line and forget a line that has become empty, or tags would pile up."""
    line = waiting.get(key)
    if line is None:
        return None
    first = line.popleft()
    if not line:
        del waiting[key]
    return first
