"""The executor: a map from kinds of action to short methods. The program decides, the executor runs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from pipert.comm.errors import CommError
from pipert.comm.transport import Transport
from pipert.engine.boundary import Handover
from pipert.engine.collectives import Collective, Pending
from pipert.engine.gradients import GradientSum
from pipert.engine.messages import Outgoing
from pipert.engine.port import Message, Port
from pipert.engine.sharding import Sharding
from pipert.engine.sizes import StepSizes
from pipert.engine.stage import Gradients, Stage, StepData
from pipert.engine.tags import message_tags
from pipert.engine.timings import Timings
from pipert.engine.vocabulary import SpreadVocabulary
from pipert.engine.vocabulary_part import VocabularyPart
from pipert.errors import ConfigError
from pipert.scheduler.action import Action, Kind
from pipert.scheduler.dependencies import SUMS
from pipert.scheduler.program import Program, Span

#: The whole backward of a stage, or its first half: takes a micro-batch and the gradients of its output.
Backward = Callable[[int, Gradients], list[torch.Tensor | None]]


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

    Sends, receives and collectives are started where they stand, messages of a group at its end; a computation waits
    for the receive that feeds it and for its weights, a STEP for its gradients; what nobody waits for is waited for at
    the end of the step. So at most as many activations are live as the program says, and everything is complete when
    `run` returns.

    Args:
        program: proved.
        stages: this rank's, by number.
        transport: the ranks of the pipeline.
        reductions: for each stage of this rank what its REDUCE sums.
        ties: for each tie of the program that has a copy here what its TIE sums.
        device: where received tensors live.
        rank: this rank's number in the world, for error messages.
        sharding: what an optimizer's actions do; None if the program has none.
        part: this rank's rows of a spread vocabulary.

    Attributes:
        sums: what its REDUCE and TIE actions sum.
        updates: whether a rank of the program updates weights.

    Raises:
        ConfigError: the program has an action that the engine cannot run.
    """

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, Stage],
        transport: Transport,
        reductions: Mapping[int, Collective],
        ties: Mapping[int, Collective],
        device: torch.device,
        rank: int,
        sharding: Sharding | None = None,
        part: VocabularyPart | None = None,
    ) -> None:
        self.program = program
        self._stages, self._reductions, self._ties, self._sharding = stages, reductions, ties, sharding
        self._transport = transport
        self._rank = rank
        self._row = program.rows[transport.rank]
        self._last_tie = {action.microbatch: action for action in self._row if action.kind is Kind.TIE}
        self._outgoing: deque[Outgoing] = deque()
        self._ports = {stage: Port(stage, transport, device, self._outgoing) for stage in stages}
        self._vocabulary = None if part is None else self._spread(part, device)
        self._split = {
            stage: {a.microbatch for a in self._row if a.kind is Kind.I and a.stage == stage} for stage in stages
        }
        self._moved = {
            stage: {a.microbatch for a in self._row if a.kind is Kind.OFFLOAD and a.stage == stage} for stage in stages
        }
        self._timings = Timings(self._row.codes)
        self._pending = Pending([])
        self.updates = any((row.kinds == Kind.STEP).any() for row in program.rows)
        self._last_scatter = {a.stage: a for a in self._row if a.kind is Kind.SCATTER}
        self._steps = self._compile()
        self._segments = _segments(self._steps, program.spans(transport.rank))
        sums = (step.arguments[1] for step in self._steps if step.action.kind in SUMS and step.arguments)
        self.sums = [total for total in sums if isinstance(total, GradientSum)]

    # ---- before the first step -------------------------------------------------------------------------------------

    def _compile(self) -> list[Step]:
        kinds: dict[Kind, Callable[[Action], Step]] = {
            Kind.F: self._compile_forward,
            Kind.B: self._compile_backward,
            Kind.I: self._compile_backward,
            Kind.W: self._compile_weight,
            Kind.REDUCE: self._compile_reduce,
            Kind.TIE: self._compile_tie,
            **dict.fromkeys(_OF_AN_OPTIMIZER, self._compile_update),
            Kind.OFFLOAD: self._compile_move,
            Kind.RELOAD: self._compile_move,
        }
        messages: dict[Kind, Callable[[Port, int, Message], None]] = {
            Kind.SEND_F: Port.send_forward,
            Kind.RECV_F: Port.receive_forward,
            Kind.SEND_B: Port.send_backward,
            Kind.RECV_B: Port.receive_backward,
            Kind.SEND_META: Port.send_sizes,
            Kind.RECV_META: Port.receive_sizes,
        }
        tags = message_tags(self.program, self._transport.rank, self._transport.tag_bound)
        steps = []
        for action in self._row:
            if action.kind in messages:
                message = Message(action, self.program.peer(action), tags[action.code])
                arguments = (self._ports[action.stage], action.microbatch, message)
                steps.append(Step(str(action), action, None, messages[action.kind], arguments))
            elif self._vocabulary is not None and action.kind in self._vocabulary.perform:
                steps.append(self._compile_vocabulary(action, self._vocabulary))
            elif action.kind in kinds:
                steps.append(kinds[action.kind](action))
            else:
                raise ConfigError(f"the engine cannot run {action}; use another schedule")
        return steps

    def _compile_forward(self, action: Action) -> Step:
        stage, port = action.stage, self._ports[action.stage]
        leaves = self._crosses_ranks(stage + 1)
        goal = port.leaving if leaves or stage + 1 == self.program.num_stages else self._ports[stage + 1].inputs
        prepare = self._finish_forward if self._crosses_ranks(stage) else self._reap
        if stage == 0 and self._vocabulary is not None:
            prepare = self._finish_embedding
        prepare = self._with_weights(stage, prepare)
        return Step(str(action), action, prepare, self._forward, (port, action.microbatch, self._stages[stage], goal))

    def _compile_backward(self, action: Action) -> Step:
        stage, port = action.stage, self._ports[action.stage]
        goal, spread = None, self.program.vocabulary
        if stage > self.program.trainable_from or (stage == 0 and spread is not None and spread.embedding):
            leaves = stage == 0 or self._crosses_ranks(stage)
            goal = port.leaving_gradients if leaves else self._ports[stage - 1].gradients
        prepare = self._finish_backward if self._crosses_ranks(stage + 1) else self._reap
        if stage + 1 == self.program.num_stages and self._vocabulary is not None:
            prepare = self._finish_hidden
        prepare = self._with_weights(stage, prepare)
        half = action.kind is Kind.I
        run = self._stages[stage].backward_input if half else self._stages[stage].backward
        return Step(str(action), action, prepare, self._backward, (port, action.microbatch, run, goal))

    def _compile_weight(self, action: Action) -> Step:
        prepare, run = self._with_weights(action.stage, self._reap), self._stages[action.stage].backward_weight
        return Step(str(action), action, prepare, run, (action.microbatch,))

    def _compile_move(self, action: Action) -> Step:
        stage = self._stages[action.stage]
        run = stage.offload if action.kind is Kind.OFFLOAD else stage.reload
        return Step(str(action), action, None, run, (action.microbatch,))

    def _spread(self, part: VocabularyPart, device: torch.device) -> SpreadVocabulary:
        owners, stages = self.program.placement.owners, self.program.num_stages
        uses = {Kind.SUM_H, Kind.T} & set(map(Kind, self._row.kinds.tolist()))
        return SpreadVocabulary(part, self._transport, owners[0], owners[-1], self._ports, stages - 1, device, uses)

    def _compile_vocabulary(self, action: Action, vocabulary: SpreadVocabulary) -> Step:
        wait = vocabulary.prepare.get(action.kind)

        def prepare(microbatch: int) -> None:
            self._reap()
            if wait is not None:
                wait(microbatch)

        return Step(str(action), action, prepare, vocabulary.perform[action.kind], (action.microbatch,))

    def _crosses_ranks(self, boundary: int) -> bool:
        """Whether there is a boundary before stage ``boundary``, and its stages are on different ranks."""
        return 0 < boundary < self.program.num_stages and not self.program.placement.is_local(boundary - 1)

    def _compile_reduce(self, action: Action) -> Step:
        return self._collective(action, self._reductions[action.stage])

    def _compile_tie(self, action: Action) -> Step:
        """Copies on one rank are one parameter: its last TIE speaks for all of them."""
        if self._last_tie[action.microbatch] != action or action.microbatch not in self._ties:
            return Step(str(action), action, None, _nothing, ())
        return self._collective(action, self._ties[action.microbatch])

    def _compile_update(self, action: Action) -> Step:
        """What belongs to an optimizer."""
        stage, sharding = action.stage, self._sharding
        if sharding is None:
            raise ConfigError(f"the engine runs {action} for an optimizer of pipert only, such as pipert.ZeroAdamW")
        if action.kind is Kind.SCATTER:
            return self._collective(action, sharding.scatter(stage, last=self._last_scatter[stage] == action))
        if action.kind is Kind.GATHER:
            return self._collective(action, sharding.gather(stage))
        optimizer = sharding.optimizer
        local: dict[Kind, Callable[..., None]] = {
            Kind.FREE: lambda: sharding.free(stage),
            Kind.NORM: optimizer.decide_now,
            Kind.STEP: lambda: optimizer.update(stage),
            Kind.UNDO: lambda: optimizer.undo(stage),
        }
        return Step(str(action), action, self._settling(action), local[action.kind], ())

    def _collective(self, action: Action, collective: Collective) -> Step:
        return Step(str(action), action, self._settling(action), self._pending_start, (action, collective))

    def _settling(self, action: Action) -> Callable[..., None]:
        """Waits for what must be complete before an action that is no computation: see `Semantics`."""
        tied = {stage for tie in self.program.ties if action.stage in tie for stage in tie} | {action.stage}
        kinds = {Kind.FREE: (Kind.GATHER,), Kind.GATHER: (), Kind.NORM: SUMS}.get(action.kind, SUMS)

        def needed(other: Action) -> bool:
            return other.kind in kinds and (other.stage in tied or action.kind is Kind.NORM)

        def prepare(*_: object) -> None:
            self._pending.settle(needed)

        return prepare

    def _with_weights(self, stage: int, prepare: Callable[..., None]) -> Callable[..., None]:
        """Also waits for the stage's weights, where they are gathered."""
        if self.program.zero < 3:
            return prepare

        def prepare_all(*arguments: object) -> None:
            self._pending.settle(lambda other: other.kind is Kind.GATHER and other.stage == stage)
            self._stages[stage].find_memories()
            prepare(*arguments)

        return prepare_all

    # ---- the step --------------------------------------------------------------------------------------------------

    def run(self, data: StepData | None = None, sizes: StepSizes | None = None) -> Timings:
        """Run the row once.

        Args:
            data: what the stages need; an update of the weights needs neither this
            sizes: nor what is known of the boundaries.

        Returns:
            when every action began and ended.

        Raises:
            BaseException: whatever an action raised, with a note that names rank, stage, micro-batch and action.
        """
        self._timings = Timings(self._row.codes, origin=time.perf_counter())
        self._pending = Pending(self._timings.ends)
        if data is not None and sizes is not None:
            self._begin(data, sizes)
        try:
            if self._vocabulary is not None and data is not None:
                self._vocabulary.begin(data)
            self._run_steps(self._timings)
        except BaseException as error:
            reached = len(self._timings.ends)
            if reached < len(self._steps) and not isinstance(error, CommError):
                error.add_note(self._place(self._steps[reached].action))
            raise
        return self._timings

    def _begin(self, data: StepData, sizes: StepSizes) -> None:
        for port in self._ports.values():
            port.sizes = sizes
        for stage in self._stages.values():
            stage.begin(data, self._split[stage.index], self._moved[stage.index])
        for total in self.sums:
            total.begin(data.scale)
        if self._sharding is not None and self._sharding.optimizer.zero and data.recording:
            self._sharding.begin(data.scale)

    def _run_steps(self, timings: Timings) -> None:
        for grouped, steps in self._segments:
            with self._transport.group() if grouped else nullcontext():
                self._run_segment(steps, timings)
        self._finish()

    def _run_segment(self, steps: Sequence[Step], timings: Timings) -> None:
        clock, report = time.perf_counter, self._transport.report
        started, ended = timings.starts.append, timings.ends.append
        for name, _, prepare, perform, arguments in steps:
            if prepare is not None:  # what needs nothing is over before anybody could ask
                report(name)
                prepare(*arguments)
            started(clock())
            perform(*arguments)
            ended(clock())

    def _place(self, action: Action) -> str:
        microbatch = f"micro-batch {action.microbatch}, " if action.kind.has_microbatch else ""
        return f"rank {self._rank}, stage {action.stage}, {microbatch}action {action}"

    def _forward(self, port: Port, microbatch: int, stage: Stage, goal: dict[int, Handover]) -> None:
        result = stage.forward(microbatch, port.inputs.pop(microbatch, None))
        if result is not None:
            goal[microbatch] = result

    def _backward(
        self, port: Port, microbatch: int, run: Backward, goal: dict[int, list[torch.Tensor | None]] | None
    ) -> None:
        result = run(microbatch, port.gradients.pop(microbatch, ()))
        if goal is not None:
            goal[microbatch] = result

    def _pending_start(self, action: Action, collective: Collective) -> None:
        self._pending.start(action, collective)

    # ---- waiting ---------------------------------------------------------------------------------------------------

    def _finish_forward(self, port: Port, microbatch: int, *_: object) -> None:
        self._reap()
        port.finish_forward(microbatch)

    def _finish_backward(self, port: Port, microbatch: int, *_: object) -> None:
        self._reap()
        port.finish_backward(microbatch)

    def _finish_embedding(self, port: Port, microbatch: int, *_: object) -> None:
        assert self._vocabulary is not None
        self._reap()
        self._vocabulary.finish_embedding(microbatch)

    def _finish_hidden(self, port: Port, microbatch: int, *_: object) -> None:
        assert self._vocabulary is not None
        self._reap()
        self._vocabulary.finish_hidden(microbatch)

    def _reap(self, *_: object) -> None:
        """Let go of what has been sent, and move sums on, without waiting."""
        while self._outgoing and self._outgoing[0].done():
            self._outgoing.popleft().check()
        if self._vocabulary is not None:
            self._vocabulary.reap()
        if self._pending:
            self._transport.progress()
            self._pending.reap()

    def _finish(self) -> None:
        """The end of the step: everything is complete."""
        while self._outgoing:
            outgoing = self._outgoing.popleft()
            for request in outgoing.requests:
                self._transport.wait(request, outgoing.doing, outgoing.peer)
            outgoing.check()
        if self._vocabulary is not None:
            self._vocabulary.finish()
        self._pending.finish()


#: Actions that only an optimizer of pipert's own gives a meaning.
_OF_AN_OPTIMIZER = (Kind.SCATTER, Kind.GATHER, Kind.FREE, Kind.NORM, Kind.STEP, Kind.UNDO)


def _segments(steps: Sequence[Step], groups: Sequence[Span]) -> list[tuple[bool, Sequence[Step]]]:
    """The steps in order, cut where groups of messages begin and end; with each part whether it is such a group."""
    edges = [0, *(edge for span in sorted(groups) for edge in span), len(steps)]
    parts = [(number % 2 == 1, steps[start:stop]) for number, (start, stop) in enumerate(pairwise(edges))]
    return [(grouped, part) for grouped, part in parts if part]


def _nothing() -> None:
    """Done elsewhere."""
