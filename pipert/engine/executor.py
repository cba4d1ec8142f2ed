"""The executor: a map from kinds of action to short methods. The program decides, the executor runs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from pipert.comm.errors import CommError
from pipert.comm.transport import Request, Transport
from pipert.engine.boundary import BoundarySpec, Handover
from pipert.engine.gradients import GradientSum
from pipert.engine.messages import (
    Incoming,
    Outgoing,
    finish_spec,
    receive_spec,
    receive_tensors,
    send_spec,
    send_tensors,
)
from pipert.engine.sizes import StepSizes
from pipert.engine.stage import Stage, StepData
from pipert.engine.tags import message_tags
from pipert.engine.timings import Timings
from pipert.errors import ConfigError
from pipert.scheduler.action import Action, Kind
from pipert.scheduler.program import Program


class Message(NamedTuple):
    """One end of a message: what it is called, who is at the other end, and its tag."""

    action: Action
    peer: int
    tag: int


class Arrival(NamedTuple):
    """Tensors that were asked for and may still be on their way."""

    message: Message
    incoming: Incoming
    spec: BoundarySpec


class Step(NamedTuple):
    """One action, ready to be run: ``prepare`` waits for what it needs, ``perform`` does it.

    The name is made once, because every step reports it.
    """

    name: str
    action: Action
    prepare: Callable[..., None] | None
    perform: Callable[..., None]
    arguments: tuple[Any, ...]


class Executor:
    """Runs one rank's row of a program, step after step.

    Sends are started where they stand and kept until they are complete; receives are posted where they stand, and the
    computation that needs one waits for it. Everything is complete when `run` returns.

    Args:
        program: proved.
        stages: this rank's, by number.
        transport: the ranks of the pipeline.
        reductions: for each stage of this rank what its REDUCE sums.
        ties: for each tie of the program that has a copy here what its TIE sums.
        device: where received tensors live.
        rank: this rank's number in the world, for error messages.
    """

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, Stage],
        transport: Transport,
        reductions: Mapping[int, GradientSum],
        ties: Mapping[int, GradientSum],
        device: torch.device,
        rank: int,
    ) -> None:
        self.program = program
        self._stages = stages
        self._transport = transport
        self._reductions = reductions
        self._ties = ties
        self._device = device
        self._rank = rank
        self._row = program.rows[transport.rank]
        self._last_tie = {a.microbatch: a for a in self._row if a.kind is Kind.TIE}
        self._inputs: dict[int, dict[int, Handover]] = {stage: {} for stage in stages}
        self._gradients: dict[int, dict[int, list[torch.Tensor]]] = {stage: {} for stage in stages}
        self._arriving: dict[tuple[int, bool], dict[int, Arrival]] = {(s, b): {} for s in stages for b in (True, False)}
        self._arriving_sizes: dict[int, dict[int, tuple[Message, Incoming]]] = {stage: {} for stage in stages}
        self._leaving: dict[int, dict[int, Handover]] = {stage: {} for stage in stages}
        self._leaving_gradients: dict[int, dict[int, list[torch.Tensor]]] = {stage: {} for stage in stages}
        self._outgoing: deque[Outgoing] = deque()
        self._summing: list[tuple[int, GradientSum, list[Request]]] = []
        self._timings = Timings(self._row.codes)
        self._steps = self._compile()
        self._sums: list[GradientSum] = [step.arguments[0] for step in self._steps if step.perform == self._sum]

    # ---- before the first step -------------------------------------------------------------------------------------

    def _compile(self) -> list[Step]:
        kinds: dict[Kind, Callable[[Action, Message | None], Step]] = {
            Kind.F: self._compile_forward,
            Kind.B: self._compile_backward,
            Kind.SEND_F: lambda a, m: Step(str(a), a, None, self._send_forward, (a.stage, a.microbatch, m)),
            Kind.RECV_F: lambda a, m: Step(str(a), a, None, self._receive_forward, (a.stage, a.microbatch, m)),
            Kind.SEND_B: lambda a, m: Step(str(a), a, None, self._send_backward, (a.stage, a.microbatch, m)),
            Kind.RECV_B: lambda a, m: Step(str(a), a, None, self._receive_backward, (a.stage, a.microbatch, m)),
            Kind.SEND_META: lambda a, m: Step(str(a), a, None, self._send_sizes, (a.stage, a.microbatch, m)),
            Kind.RECV_META: lambda a, m: Step(str(a), a, None, self._receive_sizes, (a.stage, a.microbatch, m)),
            Kind.REDUCE: lambda a, m: Step(str(a), a, None, self._sum, (self._reductions[a.stage],)),
            Kind.TIE: self._compile_tie,
        }
        tags = message_tags(self.program, self._transport.rank, self._transport.tag_bound)
        steps = []
        for action in self._row:
            if action.kind not in kinds:
                raise ConfigError(f"the engine cannot run {action}: it runs whole backwards only; use another schedule")
            message = None
            if action.kind.is_message:
                message = Message(action, self.program.peer(action), tags[action.code])
            steps.append(kinds[action.kind](action, message))
        return steps

    def _compile_forward(self, action: Action, message: Message | None) -> Step:
        stage = action.stage
        arrives = stage > 0 and not self.program.placement.is_local(stage - 1)
        leaves = stage + 1 < self.program.num_stages and not self.program.placement.is_local(stage)
        goal = self._leaving[stage] if leaves else self._inputs.get(stage + 1, {})
        arguments = (stage, action.microbatch, self._stages[stage], goal)
        return Step(str(action), action, self._finish_forward if arrives else self._reap, self._forward, arguments)

    def _compile_backward(self, action: Action, message: Message | None) -> Step:
        stage = action.stage
        arrives = stage + 1 < self.program.num_stages and not self.program.placement.is_local(stage)
        leaves = stage > 0 and not self.program.placement.is_local(stage - 1)
        goal = None
        if stage > self.program.trainable_from:
            goal = self._leaving_gradients[stage] if leaves else self._gradients[stage - 1]
        arguments = (stage, action.microbatch, self._stages[stage], goal)
        return Step(str(action), action, self._finish_backward if arrives else self._reap, self._backward, arguments)

    def _compile_tie(self, action: Action, message: Message | None) -> Step:
        """Copies on one rank are one parameter: its last TIE speaks for all of them."""
        if self._last_tie[action.microbatch] != action or action.microbatch not in self._ties:
            return Step(str(action), action, None, _nothing, ())
        return Step(str(action), action, None, self._sum, (self._ties[action.microbatch],))

    # ---- the step --------------------------------------------------------------------------------------------------

    def run(self, data: StepData, sizes: StepSizes) -> Timings:
        """Run the row once.

        Args:
            data: what the stages need.
            sizes: what is known of the boundaries.

        Returns:
            when every action began and ended.

        Raises:
            BaseException: whatever an action raised, with a note that names rank, stage, micro-batch and action.
        """
        self._sizes = sizes
        timings = self._timings = Timings(self._row.codes, origin=time.perf_counter())
        for stage in self._stages.values():
            stage.begin(data)
        for total in self._sums:
            total.begin()
        try:
            self._run_steps(timings)
        except BaseException as error:
            reached = len(timings.ends)
            if reached < len(self._steps) and not isinstance(error, CommError):
                error.add_note(self._place(self._steps[reached].action))
            raise
        return timings

    def _place(self, action: Action) -> str:
        microbatch = f"micro-batch {action.microbatch}, " if action.kind.has_microbatch else ""
        return f"rank {self._rank}, stage {action.stage}, {microbatch}action {action}"

    def _run_steps(self, timings: Timings) -> None:
        clock, report = time.perf_counter, self._transport.report
        started, ended = timings.starts.append, timings.ends.append
        for name, _, prepare, perform, arguments in self._steps:
            report(name)
            if prepare is not None:
                prepare(*arguments)
            started(clock())
            perform(*arguments)
            ended(clock())
        self._finish()

    def _forward(self, stage: int, microbatch: int, runner: Stage, goal: dict[int, Handover]) -> None:
        result = runner.forward(microbatch, self._inputs[stage].pop(microbatch, None))
        if result is not None:
            goal[microbatch] = result

    def _backward(self, stage: int, microbatch: int, runner: Stage, goal: dict[int, list[torch.Tensor]] | None) -> None:
        result = runner.backward(microbatch, self._gradients[stage].pop(microbatch, ()))
        if goal is not None:
            goal[microbatch] = result

    def _send_forward(self, stage: int, microbatch: int, message: Message) -> None:
        handover = self._leaving[stage].pop(microbatch)
        self._sizes.sent(stage, microbatch, handover.spec)
        outgoing = Outgoing(message.action, message.peer)
        send_tensors(self._transport, handover.tensors, handover.spec.tensors, message.tag, outgoing)
        self._outgoing.append(outgoing)

    def _receive_forward(self, stage: int, microbatch: int, message: Message) -> None:
        if microbatch in self._arriving_sizes[stage]:
            told, incoming = self._arriving_sizes[stage].pop(microbatch)
            spec = finish_spec(self._transport, incoming, told.action, told.peer, told.tag)
            self._sizes.told(stage, microbatch, spec)
        spec = self._sizes.before(stage, microbatch)
        incoming = receive_tensors(self._transport, spec.tensors, self._device, message.peer, message.tag)
        self._arriving[stage, True][microbatch] = Arrival(message, incoming, spec)

    def _send_backward(self, stage: int, microbatch: int, message: Message) -> None:
        gradients = self._leaving_gradients[stage].pop(microbatch)
        outgoing = Outgoing(message.action, message.peer)
        specs = self._sizes.before(stage, microbatch).gradients
        send_tensors(self._transport, gradients, specs, message.tag, outgoing)
        self._outgoing.append(outgoing)

    def _receive_backward(self, stage: int, microbatch: int, message: Message) -> None:
        spec = self._sizes.before(stage + 1, microbatch)
        incoming = receive_tensors(self._transport, spec.gradients, self._device, message.peer, message.tag)
        self._arriving[stage, False][microbatch] = Arrival(message, incoming, spec)

    def _send_sizes(self, stage: int, microbatch: int, message: Message) -> None:
        outgoing = Outgoing(message.action, message.peer)
        send_spec(self._transport, self._leaving[stage][microbatch].spec, message.tag, outgoing)
        self._outgoing.append(outgoing)

    def _receive_sizes(self, stage: int, microbatch: int, message: Message) -> None:
        incoming = receive_spec(self._transport, message.peer, message.tag)
        self._arriving_sizes[stage][microbatch] = message, incoming

    def _sum(self, total: GradientSum) -> None:
        self._summing.append((len(self._timings.ends), total, total.start()))

    # ---- waiting ---------------------------------------------------------------------------------------------------

    def _finish_forward(self, stage: int, microbatch: int, *_: object) -> None:
        self._reap()
        arrival = self._arriving[stage, True].pop(microbatch)
        self._wait(arrival.incoming.requests, arrival.message.action, arrival.message.peer)
        self._inputs[stage][microbatch] = Handover(arrival.spec, arrival.incoming.tensors)

    def _finish_backward(self, stage: int, microbatch: int, *_: object) -> None:
        self._reap()
        arrival = self._arriving[stage, False].pop(microbatch)
        self._wait(arrival.incoming.requests, arrival.message.action, arrival.message.peer)
        self._gradients[stage][microbatch] = arrival.incoming.tensors

    def _wait(self, requests: Sequence[Request], doing: object, peer: int) -> None:
        for request in requests:
            self._transport.wait(request, doing, peer)

    def _reap(self, *_: object) -> None:
        """Let go of what has been sent, without waiting."""
        while self._outgoing and self._outgoing[0].done():
            self._outgoing.popleft().check()

    def _finish(self) -> None:
        """The end of the step: everything is complete."""
        while self._outgoing:
            outgoing = self._outgoing.popleft()
            self._wait(outgoing.requests, outgoing.doing, outgoing.peer)
            outgoing.check()
        for position, total, requests in self._summing:
            for request in requests:
                total.transport.wait(request, self._steps[position].name)
            total.finish()
            self._timings.ends[position] = time.perf_counter()
        self._summing.clear()


def _nothing() -> None:
    """Done elsewhere."""
