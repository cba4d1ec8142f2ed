"""A stage's ends of its two boundaries: what it has in hand, what is on its way in, what is to be sent."""

from __future__ import annotations

from collections import deque
from itertools import compress
from typing import NamedTuple

import torch

from pipert.comm.transport import Transport
from pipert.engine.boundary import BoundarySpec, Handover, LeafSpec, zeros
from pipert.engine.messages import (
    Incoming,
    Outgoing,
    finish_spec,
    receive_spec,
    receive_tensors,
    send_spec,
    send_tensors,
)
from pipert.engine.sizes import StepSizes, Used
from pipert.scheduler.action import Action

#: One byte for each gradient that might flow back: whether it does.
FLAG = LeafSpec((0,), "uint8", False, True)


class Message(NamedTuple):
    """One end of a message: what it is called, who is at the other end, and its tag."""

    action: Action
    peer: int
    tag: int


class _Arrival(NamedTuple):
    """Tensors that were asked for and may still be on their way."""

    message: Message
    incoming: Incoming
    spec: BoundarySpec


class Port:
    """Moves values between a stage and its neighbours on other ranks. One method for each kind of message.

    A send is started at once and kept in `outgoing` until it is complete. A receive is posted at once;
    `finish_forward` and `finish_backward` wait for it. Neighbours on the same rank put values into each other's
    `inputs` and `gradients` without any message.

    Args:
        stage: whose port.
        transport: the ranks of the pipeline.
        device: where received tensors live.
        outgoing: what this rank has sent and does not know to be complete, of all its ports.

    Attributes:
        sizes: what is known of the boundaries in this step.
        inputs: by micro-batch, what the stage's forward will take.
        gradients: by micro-batch, what its backward will take.
        leaving: by micro-batch, its output, to be sent.
        leaving_gradients: by micro-batch, its input's gradients, to be sent.
    """

    def __init__(self, stage: int, transport: Transport, device: torch.device, outgoing: deque[Outgoing]) -> None:
        self.stage = stage
        self.sizes = StepSizes([])
        self.inputs: dict[int, Handover] = {}
        self.gradients: dict[int, list[torch.Tensor | None]] = {}
        self.leaving: dict[int, Handover] = {}
        self.leaving_gradients: dict[int, list[torch.Tensor | None]] = {}
        self._transport = transport
        self._device = device
        self._outgoing = outgoing
        self._arriving: dict[int, _Arrival] = {}
        self._arriving_gradients: dict[int, tuple[_Arrival, Used | None]] = {}
        self._arriving_sizes: dict[int, tuple[Message, Incoming]] = {}

    # ---- forward ---------------------------------------------------------------------------------------------------

    def send_sizes(self, microbatch: int, message: Message) -> None:
        """SEND_META."""
        outgoing = self._begin(message)
        send_spec(self._transport, self.leaving[microbatch].spec, message.tag, outgoing)

    def send_forward(self, microbatch: int, message: Message) -> None:
        """SEND_F."""
        handover = self.leaving.pop(microbatch)
        self.sizes.sent(self.stage, microbatch, handover.spec)
        send_tensors(self._transport, handover.tensors, handover.spec.tensors, message.tag, self._begin(message))

    def receive_sizes(self, microbatch: int, message: Message) -> None:
        """RECV_META."""
        self._arriving_sizes[microbatch] = message, receive_spec(self._transport, message.peer, message.tag)

    def receive_forward(self, microbatch: int, message: Message) -> None:
        """RECV_F; waits for the sizes first, where they travel."""
        if microbatch in self._arriving_sizes:
            told, incoming = self._arriving_sizes.pop(microbatch)
            spec = finish_spec(self._transport, incoming, told.action, told.peer, told.tag)
            self.sizes.told(self.stage, microbatch, spec)
        spec = self.sizes.before(self.stage, microbatch)
        incoming = receive_tensors(self._transport, spec.tensors, self._device, message.peer, message.tag)
        self._arriving[microbatch] = _Arrival(message, incoming, spec)

    def finish_forward(self, microbatch: int) -> None:
        """Wait for what RECV_F asked for."""
        arrival = self._arriving.pop(microbatch)
        self._wait(arrival)
        self.inputs[microbatch] = Handover(arrival.spec, arrival.incoming.tensors)

    # ---- backward --------------------------------------------------------------------------------------------------

    def send_backward(self, microbatch: int, message: Message) -> None:
        """SEND_B; says first which gradients there are, where the other end does not know."""
        gradients, outgoing = self.leaving_gradients.pop(microbatch), self._begin(message)
        specs = self.sizes.before(self.stage, microbatch).gradients
        used = self.sizes.used(self.stage, microbatch)
        found = tuple(gradient is not None for gradient in gradients)
        self.sizes.found(self.stage, microbatch, found)
        if used is None:
            if specs:
                outgoing.send(self._transport, torch.tensor(found, dtype=torch.uint8), message.tag)
            used = (True,) * len(specs)
        specs = tuple(compress(specs, used))
        filled = [
            zeros(spec, self._device) if gradient is None else gradient
            for gradient, spec in zip(compress(gradients, used), specs, strict=True)
        ]
        send_tensors(self._transport, filled, specs, message.tag, outgoing)

    def receive_backward(self, microbatch: int, message: Message) -> None:
        """RECV_B."""
        spec = self.sizes.before(self.stage + 1, microbatch)
        used = self.sizes.used(self.stage + 1, microbatch)
        specs = spec.gradients if used is None else tuple(compress(spec.gradients, used))
        flags = [FLAG._replace(shape=(len(specs),))] if used is None and specs else []
        told = receive_tensors(self._transport, tuple(flags), self._device, message.peer, message.tag)
        incoming = receive_tensors(self._transport, specs, self._device, message.peer, message.tag)
        both = Incoming(told.tensors + incoming.tensors, told.requests + incoming.requests)
        self._arriving_gradients[microbatch] = _Arrival(message, both, spec), used

    def finish_backward(self, microbatch: int) -> None:
        """Wait for what RECV_B asked for."""
        arrival, used = self._arriving_gradients.pop(microbatch)
        self._wait(arrival)
        tensors = arrival.incoming.tensors
        if used is None:
            flags, tensors = (tensors[0].tolist(), tensors[1:]) if tensors else ([], [])
            used = tuple(map(bool, flags))
            self.sizes.found(self.stage + 1, microbatch, used)
            tensors = list(compress(tensors, used))
        there = iter(tensors)
        self.gradients[microbatch] = [next(there) if flag else None for flag in used]

    def _begin(self, message: Message) -> Outgoing:
        outgoing = Outgoing(message.action, message.peer)
        self._outgoing.append(outgoing)
        return outgoing

    def _wait(self, arrival: _Arrival) -> None:
        for request in arrival.incoming.requests:
            self._transport.wait(request, arrival.message.action, arrival.message.peer)
