"""One step after another: what a rank does around the executor."""

from __future__ import annotations

import json
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any, TypeVar

import torch

from pipert.comm.errors import JobAborted
from pipert.comm.mesh import Mesh
from pipert.engine import batch as batches
from pipert.engine.boundary import BoundarySpec, leaf_spec
from pipert.engine.build import Parts
from pipert.engine.collectives import Collective
from pipert.engine.executor import Executor
from pipert.engine.gradients import GradientSum, Unscaling
from pipert.engine.header import Agreement, Position, Report, agree
from pipert.engine.loss import CountFunction, counts
from pipert.engine.parameters import ranks_of
from pipert.engine.programs import ProgramKey, Programs
from pipert.engine.refusals import REFUSALS, encode
from pipert.engine.result import StepResult
from pipert.engine.settings import check_positive
from pipert.engine.sharding import Sharding
from pipert.engine.sizes import SizeBook
from pipert.engine.stage import Stage, StepData
from pipert.engine.structure import flatten
from pipert.engine.timings import Timings
from pipert.errors import ConfigError
from pipert.layers.shard import is_summed
from pipert.optim.precision import accumulates_in
from pipert.randomness import Draw
from pipert.scheduler.action import Kind
from pipert.scheduler.program import Program
from pipert.scheduler.vocabulary import Vocabulary

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Call:
    """What the user called.

    Attributes:
        training: with backwards.
        microbatches: how many to split the batch into.
        step: the step's number.
        seed: of the run.
        outputs: whether the model's outputs are kept.
        scale: the loss scale.
    """

    training: bool
    microbatches: int
    step: int
    seed: int
    outputs: bool = False
    scale: float = 1.0


class Session:
    """Runs steps on one rank.

    A step is: pull and split the batch where it is needed; the header's exchange, after which every rank knows the
    whole step or raises the same refusal; the program's row; one exchange for the result.

    Args:
        mesh: all ranks.
        programs: where programs come from.
        parts: what this rank built.
        stages: the same, ready to run.
        count_fn: what a micro-batch's targets count.
        device: where this rank computes.
        dynamic: sizes depend on data, so they travel with every micro-batch.

    Attributes:
        recent: when the actions of the last few steps with backwards ran.
    """

    def __init__(
        self,
        mesh: Mesh,
        programs: Programs,
        parts: Parts,
        stages: dict[int, Stage],
        count_fn: CountFunction,
        device: torch.device,
        dynamic: bool,
    ) -> None:
        self._mesh, self._programs, self._parts, self._stages = mesh, programs, parts, stages
        self._count_fn, self._device = count_fn, device
        self._sizes = SizeBook(dynamic=dynamic)
        self._executors: OrderedDict[tuple[ProgramKey, str], Executor] = OrderedDict()
        self._updates: dict[tuple[Kind, ...], Executor] = {}
        self._sharding: Sharding | None = None
        self._broken: BaseException | None = None
        self._position = _position(mesh, programs)
        own = programs.placement.stages_of(mesh.pp_group.rank)
        self._first, self._last = 0 in own, programs.placement.num_stages - 1 in own
        self.recent: deque[Timings] = deque(maxlen=8)

    def run(self, source: object, call: Call) -> StepResult:
        """Run one step.

        Raises:
            PipertError, ScheduleError: the step was refused, on every rank alike; nothing was changed.
            BaseException: an action failed, here or on another rank; the job has been told to end.
        """
        if self._broken is not None:
            raise ConfigError(f"an earlier step of this pipeline failed ({self._broken!r:.200}); start the job again")
        if call.outputs and self._parts.vocabulary is not None:
            raise ConfigError(
                "outputs=True asks for whole logits, which no rank has where the vocabulary is spread; leave it out"
            )
        tell, name = self._mesh.world.report, "step" if call.training else "eval_step"
        tell(f"pulling the batch of {name} {call.step}")
        report, inputs, targets = self._failing(lambda: self._prepare(source, call))
        blobs = self._failing(lambda: self._mesh.world.exchange(report.encode()))
        agreement = agree([Report.decode(blob) for blob in blobs], self._position)
        executor = self._executor(agreement, call, report.pattern)
        data = self._data(agreement, call, inputs, targets)
        result = self._failing(lambda: self._run(executor, data, agreement, call))
        tell(f"the trainer's own code, after {name} {call.step}")
        return result

    def forget_programs(self) -> None:
        """The schedules have changed: make the executors of the next steps anew."""
        self._executors.clear()

    def _failing(self, work: Callable[[], _Result]) -> _Result:
        """Do some work; if it fails, the whole job does."""
        try:
            return work()
        except BaseException as error:
            self._broken = error
            if not isinstance(error, JobAborted):
                self._mesh.world.abort(error)
            raise

    # ---- before ----------------------------------------------------------------------------------------------------

    def _prepare(self, source: object, call: Call) -> tuple[Report, list[Any], list[Any]]:
        """Pull and split what this rank needs; what is wrong with it becomes a refusal of all ranks."""
        book = self._parts.book
        mode, part = _mode(call, self._device, self._mesh.tp > 1), self._parts.vocabulary
        trained = (False, False) if part is None else part.trained
        inputs: list[Any] = []
        targets: list[Any] = []
        try:
            check_positive("microbatches", call.microbatches)
            batch = batches.pull(source) if self._first or self._last else None
            if self._first:
                inputs = [self._to_device(x) for x in batches.split(batch, batches.INPUTS, call.microbatches)]
            if self._last:
                targets = [self._to_device(y) for y in batches.split(batch, batches.TARGETS, call.microbatches)]
            if part is not None:
                part.check(inputs, targets)
            counted = any(target is not None for target in targets)
            report = Report(
                mode,
                signatures=tuple(map(signature, inputs)),
                samples=tuple(map(batches.samples, inputs)),
                counts=counts(targets, self._count_fn) if counted else None,
                trainable=(*book.trainable_stages(), *([0] if trained[0] else [])),
                pattern=book.pattern(),
                ties=book.tie_flags(),
                vocabulary=() if part is None else trained,
            )
        except REFUSALS as error:
            report = Report(mode, refusal=encode(error))
        return report, inputs, targets

    def _to_device(self, value: object) -> Any:
        return batches.to_device(value, self._device) if self._device.type != "cpu" else value

    def _executor(self, agreement: Agreement, call: Call, pattern: str) -> Executor:
        """The executor of the step's program: made, and proved, the first time."""
        training = call.training and (agreement.trainable_from < self._position.stages or any(agreement.vocabulary))
        live = [number for number, on in enumerate(agreement.ties) if on and self._summed(number)] if training else []
        optimizer = None if self._sharding is None else self._sharding.optimizer
        zero = 0 if optimizer is None else optimizer.zero
        key = ProgramKey(
            agreement.microbatches,
            agreement.trainable_from if training else self._position.stages,
            sizes=not self._sizes.knows(agreement.keys),
            ties=tuple(self._parts.ties[number].stages for number in live),
            zero=zero if training or zero == 3 else 0,
            alike=agreement.alike or not zero,
            early=training and optimizer is not None and optimizer.early,
            vocabulary=Vocabulary(*(training and on for on in agreement.vocabulary)) if agreement.vocabulary else None,
        )
        program = self._programs.program(key)
        if (key, pattern) not in self._executors:
            self._executors[key, pattern] = self._make_executor(program, key, live)
            while len(self._executors) > 64:
                self._executors.popitem(last=False)
        self._executors.move_to_end((key, pattern))
        return self._executors[key, pattern]

    def _summed(self, number: int) -> bool:
        """Whether a tie has anybody to sum with: the same on every rank."""
        return self._mesh.dp > 1 or len(ranks_of(self._parts.ties[number], self._programs.placement)) > 1

    def _make_executor(self, program: Program, key: ProgramKey, live: Sequence[int]) -> Executor:
        parts, sharding = self._parts, self._sharding
        if sharding is not None and key.zero:
            sharded = {place: total for place, number in enumerate(live) if (total := sharding.tie(number)) is not None}
            whole = {stage: sharding.reduce(stage) for stage in self._stages}
            return self._executor_of(program, whole, sharded)
        trained = [entry for entry in parts.book if entry.parameter.requires_grad]
        reductions = {
            stage: GradientSum(
                [e.parameter for e in trained if e.stage == stage and e.tie not in live and self._reduced(e.parameter)],
                self._mesh.dp_group,
                self._mesh.tp_group,
            )
            for stage in self._stages
        }
        ties = {
            place: GradientSum(
                [entry.parameter for entry in trained if entry.tie == number], group, self._mesh.tp_group
            )
            for place, number in enumerate(live)
            if (group := parts.tie_groups[number]) is not None
        }
        return self._executor_of(program, reductions, ties)

    def _executor_of(
        self, program: Program, reductions: Mapping[int, Collective], ties: Mapping[int, Collective]
    ) -> Executor:
        return Executor(
            program,
            self._stages,
            self._mesh.pp_group,
            reductions,
            ties,
            self._device,
            self._mesh.world.rank,
            self._sharding,
            self._parts.vocabulary,
        )

    def _reduced(self, parameter: torch.nn.Parameter) -> bool:
        """Whether there is anything to sum: over replicas all gradients, over tensor-parallel ranks few."""
        early = self._sharding is not None and self._sharding.optimizer.early
        return self._mesh.dp > 1 or early or is_summed(parameter)

    def attach(self, sharding: Sharding | None) -> None:
        """From now on an optimizer's actions are part of the programs; None: no longer."""
        self._sharding = sharding
        self._updates.clear()
        self._executors.clear()

    def update(self, *parts: Kind) -> None:
        """Run an update of the weights with these parts.

        Raises:
            BaseException: an action failed; the job has been told to end.
        """
        assert self._sharding is not None
        if parts not in self._updates:
            program = self._programs.update(parts, self._sharding.optimizer.zero)
            self._updates[parts] = self._executor_of(program, {}, {})
        self._failing(self._updates[parts].run)

    def _data(self, agreement: Agreement, call: Call, inputs: list[Any], targets: list[Any]) -> StepData:
        count = agreement.microbatches
        return StepData(
            recording=call.training,
            trainable_from=agreement.trainable_from,
            draws=[Draw(call.seed, call.step, samples) for samples in agreement.samples],
            weights=agreement.weights,
            inputs=inputs,
            targets=targets or [None] * count,
            losses=[None] * count,
            outputs=[None] * count if call.outputs and self._last else None,
            scale=call.scale,
        )

    # ---- the step --------------------------------------------------------------------------------------------------

    def _run(self, executor: Executor, data: StepData, agreement: Agreement, call: Call) -> StepResult:
        sizes = self._sizes.step(agreement.keys, agreement.weights)
        with Unscaling(self._unsummed(executor), data.scale):
            timings = executor.run(data, sizes)
        if self._sharding is not None and executor.updates:
            self._sharding.optimizer.speculated = True
        if call.training:
            self.recent.append(timings)
        self._sizes.learn(agreement.keys, sizes)
        if not agreement.total and call.training:
            self._nothing_counted(agreement)
            if self._sharding is not None:
                self._sharding.optimizer.gradients_changed()
        losses = self._mesh.world.exchange(json.dumps(self._own_loss(data)).encode())
        owners = [self._position.rank_at(self._position.last, replica, 0) for replica in range(self._mesh.dp)]
        return StepResult(
            loss=sum(json.loads(losses[rank]) for rank in owners),
            tokens=agreement.total,
            samples=agreement.total_samples,
            microbatches=agreement.total_microbatches,
            step=call.step,
            outputs=None if data.outputs is None else tuple(data.outputs),
        )

    def _unsummed(self, executor: Executor) -> list[torch.nn.Parameter]:
        """The trained parameters of this rank whose gradients nothing in the program sums."""
        if executor.program.zero:
            return []
        summed = {id(parameter) for total in executor.sums for parameter in total.parameters}
        return [e.parameter for e in self._parts.book if e.parameter.requires_grad and id(e.parameter) not in summed]

    def _own_loss(self, data: StepData) -> float:
        """This replica's part of the loss, on the owner of the last stage."""
        pairs = [(weight, loss) for weight, loss in zip(data.weights, data.losses, strict=True) if loss is not None]
        if not pairs:
            return 0.0
        values = torch.stack([loss.reshape(()).double() for _, loss in pairs]).tolist()
        return float(sum(weight * value for (weight, _), value in zip(pairs, values, strict=True)))

    def _nothing_counted(self, agreement: Agreement) -> None:
        """A batch in which every target is ignored has gradients of zero."""
        sharded = self._sharding is not None and self._sharding.optimizer.zero > 0
        for entry in self._parts.book:
            if entry.parameter.requires_grad and (entry.parameter.grad is None or sharded):
                entry.parameter.grad = torch.zeros_like(entry.parameter, dtype=accumulates_in(entry.parameter))
        if self._mesh.world.rank == 0:
            warnings.warn(
                f"the loss counts nothing in the whole batch ({agreement.total_samples} samples: every target "
                "is ignored); loss and gradients are 0",
                stacklevel=2,
            )


def signature(value: object) -> str:
    """Digest of a value's structure, plain data, shapes and dtypes."""
    tensors, structure = flatten(value)
    specs = tuple(leaf_spec(tensor)._replace(requires_grad=False) for tensor in tensors)
    return _digest(BoundarySpec.of(structure, specs))


@lru_cache(maxsize=1024)
def _digest(spec: BoundarySpec) -> str:
    return blake2b(spec.encode(), digest_size=8).hexdigest()


def _mode(call: Call, device: torch.device, shared: bool) -> str:
    name = "step" if call.training else "eval_step"
    if call.outputs and shared:  # their parts are put together, by all ranks that have one
        name += " with outputs"
    if torch.is_autocast_enabled(device.type):
        name += f" under autocast to {torch.get_autocast_dtype(device.type)}"
    return name + (f" with loss scale {call.scale}" if call.scale != 1.0 else "")


def _position(mesh: Mesh, programs: Programs) -> Position:
    owners = programs.placement.owners
    return Position(
        pp=mesh.pp,
        dp=mesh.dp,
        tp=mesh.tp,
        replica=mesh.dp_group.rank,
        shard=mesh.tp_group.rank,
        first=owners[0],
        last=owners[-1],
        stages=len(owners),
        ranks={mesh.shape.coordinates(rank): rank for rank in range(mesh.size)},
    )
