"""Pipeline: the object that a trainer embeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from pipert.comm.mesh import Mesh
from pipert.engine.auto import AutoOptions
from pipert.engine.design import Design
from pipert.engine.loss import CountFunction, LossFunction, default_count
from pipert.engine.norm import gradient_norm, multiply, norm_of
from pipert.engine.programs import Offload, ScheduleSource
from pipert.engine.recompute import RecomputeSetting
from pipert.engine.refusals import together
from pipert.engine.result import StepResult
from pipert.engine.session import Call, Session
from pipert.engine.settings import Settings, VocabularyPlace, usable_device
from pipert.engine.sharding import Sharding, check_same
from pipert.engine.timings import gather
from pipert.errors import ConfigError
from pipert.graph.stage import StageModule
from pipert.optim.loss_scale import Decision, LossScale, LossScaler, check_max_norm, clip_factor
from pipert.optim.memory import Memory, nbytes
from pipert.optim.precision import Precision
from pipert.optim.zero import ZeroOptimizer
from pipert.scheduler.action import Kind
from pipert.scheduler.costs import Costs
from pipert.scheduler.search import Found
from pipert.scheduler.timeline import Timeline
from pipert.scheduler.verify import Proof


class Pipeline:
    """A model cut into stages over the ranks of a mesh, and the steps that train it.

    Every rank makes the same calls. The numbers are those of one process that accumulates the same micro-batches in
    order: bitwise for pipelines alone, to rounding where gradients are summed over replicas or tied copies. A step
    leaves gradients in the parameters' ``.grad``, added to what was there; the optimizer is yours.

        mesh = pipert.Mesh.from_mpi(pp=4)
        pipe = pipert.Pipeline(model, loss_fn, mesh, schedule="1f1b", microbatches=8)
        optim = torch.optim.AdamW(pipe.parameters())
        for batch in loader:
            result = pipe.step(batch)
            optim.step(); optim.zero_grad()

    Constructing and stepping wait for the other ranks, never longer than the mesh's deadline. What cannot be run is
    refused on all ranks alike, before the first message. When an action fails on one rank, all ranks end.

    Args:
        model: an ``nn.Sequential``, a module with a method ``blocks()``, or one that torch.fx can record. Parameters
            may be on the meta device: then each rank makes those of its own stages only. Otherwise replicas get the
            weights of the first one. Parameters stay the model's own (ranks that are threads and share a model get
            copies). With tp > 1 each rank gets its part: see `pipert.parallelize`, which pipert's GPT needs not.
        loss_fn: ``loss_fn(output, target)``, the mean over what ``count_fn`` counts.
        mesh: the ranks.
        schedule: a name of `pipert.scheduler.generators.registry` (``1f1b``, ``interleaved``, ``zb-h1``, ``zb-v``, …),
            a `Schedule`, a function (ranks, microbatches) -> Schedule, or ``auto``: searched for the stages' times.
        microbatches: into how many a batch is split, at most.
        chunks: stages a rank, for schedules by name; those in a V have two by themselves; 1 leaves ``auto`` the choice.
        cuts: own cuts: the number of blocks of each stage, or the first block of each stage but the first.
        example: inputs of one micro-batch, to measure the blocks with; otherwise their times are estimated.
        recompute: what is computed again in the backward instead of kept: ``none``, the attention between its
            projections (``selective``; other layers by ``recompute_me``), every ``block``, or stages in ``full``; or
            one of them for each stage, or ``{stage: mode}``. See `pipert.engine.recompute`.
        offload: how many micro-batches of every stage keep their activations on the device, or ``{stage: number}`` for
            some stages; those of others wait in host memory for their backward. None: all stay.
        count_fn: what a micro-batch's targets count; by default the targets that are not ignored where they are class
            indices (``loss_fn.ignore_index``, else -100), else their elements.
        seed: of initial weights on the meta device, and of dropout.
        dynamic: boundaries' sizes, or which of their tensors are used, depend on data or step; both travel with every
            micro-batch.
        device: where this rank computes; default where the parameters are, else the CPU.
        dtype: of the floating-point parameters; default as declared.
        precision: ``fp32``, ``bf16``, ``fp16``, ``fp64`` or a `pipert.Precision`: the types of parameters, gradients
            and master weights; says more than ``dtype``. Without either, parameters have the types that the model
            declares. Gradients of half-precision parameters are added up in fp32 in any case, unless a Precision says
            otherwise.
        loss_scale: how the loss scale moves; default ``LossScale()`` where there are fp16 parameters, else 1.
        auto: what ``schedule="auto"`` may do; by default it takes 1F1B's memory.
        vocabulary: where embedding and head live: at the ``ends`` of the pipeline, as blocks of the first and the last
            stage, or ``spread`` over all ranks by rows, which balances large vocabularies (docs/vocabulary.md). Then
            backwards come two forwards later, and losses and gradients are those of one process to rounding.

    Attributes:
        mesh: the ranks.
        graph: the model's blocks with their costs.
        partition: the stages.
        proof: what is proved of the usual step's program.
        loss_scale: by what the loss is multiplied in fp16; gradients are divided by it before `step` returns.
        step_index: number of the next step; dropout depends on it. Set it when a run is resumed.

    Raises:
        PipertError, ScheduleError: a refusal: names the values, the rule and the remedy.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        mesh: Mesh,
        schedule: ScheduleSource = "1f1b",
        microbatches: int = 8,
        *,
        chunks: int = 1,
        cuts: Sequence[int] | Sequence[str] | None = None,
        example: object = None,
        recompute: RecomputeSetting = "none",
        count_fn: CountFunction | None = None,
        seed: int = 0,
        dynamic: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        precision: Precision | str | None = None,
        loss_scale: LossScale | None = None,
        auto: AutoOptions | None = None,
        offload: Offload = None,
        vocabulary: VocabularyPlace = "ends",
    ) -> None:
        def settle() -> Settings:
            exact = Precision.of(precision, dtype)
            return Settings(
                loss_fn,
                schedule,
                microbatches,
                chunks,
                cuts,
                example,
                recompute,
                count_fn,
                seed,
                dynamic,
                usable_device(device),
                dtype if exact is None else exact.parameters,
                exact,
                loss_scale,
                auto,
                offload,
                vocabulary,
            )

        self.mesh = mesh
        self._design = design = Design(model, loss_fn, mesh, settle)
        self._settings, self._programs, self._parts = design.settings, design.programs, design.parts
        self.graph, self.partition = design.graph, design.partition
        self.proof: Proof = design.prove()
        count = count_fn or default_count(loss_fn)
        self._session = Session(mesh, self._programs, self._parts, design.stages(), count, design.device, dynamic)
        self.step_index = 0
        self._optimizer: ZeroOptimizer | None = None
        self.loss_scale = LossScaler(loss_scale or (LossScale() if design.has_fp16 else None))

    # ---- steps -----------------------------------------------------------------------------------------------------

    def step(self, batch: object) -> StepResult:
        """Forward and backward of one batch; gradients are added to the parameters' ``.grad``.

        Args:
            batch: this replica's batch, a pair (inputs, targets) with the samples in dimension 0 of every tensor, or a
                list of such pairs, one for each micro-batch, of any sizes. Or an iterator of such batches, from which
                only the owners of the first and the last stage pull the next one. Other ranks may pass None.

        Returns:
            loss and counts of the whole batch, the same on every rank.

        Raises:
            EndOfData: the iterator is exhausted; on every rank.
            PipertError, ScheduleError: the batch was refused; on every rank, and nothing was changed.
            BaseException: an action failed; the pipeline cannot be used any more.
        """
        settings = self._settings
        scale = self.loss_scale.scale
        call = Call(True, settings.microbatches, self.step_index, settings.seed, scale=scale)
        with nullcontext() if self._optimizer is None else self._optimizer.speculating():
            result = self._session.run(batch, call)
        self.step_index += 1
        return result

    def eval_step(self, batch: object, *, microbatches: int | None = None, outputs: bool = False) -> StepResult:
        """Forward of one batch in evaluation mode; changes nothing, keeps no graph.

        Args:
            batch: as for `step`.
            microbatches: into how many the batch is split; default as for `step`.
            outputs: give back the model's outputs, on the owners of the last stage.

        Raises:
            EndOfData, PipertError, ScheduleError, BaseException: as `step`.
        """
        settings = self._settings
        count = settings.microbatches if microbatches is None else microbatches
        if self._optimizer is not None:
            self._optimizer.settle()
        with evaluating(self._parts.modules):
            return self._session.run(batch, Call(False, count, self.step_index, settings.seed, outputs))

    # ---- parameters ------------------------------------------------------------------------------------------------

    @property
    def modules(self) -> Mapping[int, StageModule]:
        """This rank's stages by number."""
        return self._parts.modules

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, with their names in the model. Copies of a tied weight have one name on all ranks."""
        return ((entry.name, entry.parameter) for entry in self._parts.book)

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters."""
        return (entry.parameter for entry in self._parts.book)

    def grad_norm(self) -> float:
        """The 2-norm of all gradients of the model; the same on every rank. Every rank calls it."""
        if self._optimizer is not None:
            return self._optimizer.norm()
        return gradient_norm(self._parts.book, self.mesh.pp_group, self.mesh.tp_group)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients of the model so that their norm is at most ``max_norm``. Every rank calls it.

        Returns:
            the norm before.

        Raises:
            ConfigError: ``max_norm`` is not positive.
        """
        check_max_norm(max_norm)
        norm = self.grad_norm()
        self._multiply(clip_factor(norm, max_norm))
        return norm

    def _multiply(self, factor: float) -> None:
        if self._optimizer is None:
            multiply(self._parts.book, factor)
        elif factor != 1.0:
            for bucket in self._optimizer.buckets:
                bucket.multiply(factor)
            self._optimizer.gradients_changed()

    def decide(self, max_norm: float | None = None) -> Decision:
        """Whether there is an update now: for an optimizer of yours, once before each ``optim.step()``.

        If a gradient anywhere is inf or NaN, every rank skips the update and the loss scale falls. Otherwise gradients
        are clipped, and the loss scale may rise. Every rank calls it.

            if pipe.decide(max_norm=1.0).apply:
                optim.step()
            optim.zero_grad()

        Args:
            max_norm: the norm that the gradients may have; None: any.

        Raises:
            ConfigError: ``max_norm`` is not positive.
        """
        if self._optimizer is not None:
            return self._optimizer.decide(max_norm)
        if max_norm is not None:
            check_max_norm(max_norm)
        decision = self.loss_scale.decide(self.grad_norm(), max_norm)
        if decision.apply:
            multiply(self._parts.book, decision.factor)
        return decision

    # ---- an optimizer of pipert's own ------------------------------------------------------------------------------

    def attach(self, optimizer: ZeroOptimizer) -> None:
        """Make an optimizer's actions part of the programs; `ZeroOptimizer` calls it. Collective.

        Raises:
            ConfigError: the optimizer cannot be used, or there is one already.
        """

        def prepare() -> None:
            if self._optimizer is not None:
                raise ConfigError("the pipeline has an optimizer already; close() that one first")
            optimizer.check()
            if optimizer.given >= 2 and self._design.spread is not None:
                raise ConfigError(
                    f'zero = {optimizer.given} does not go with vocabulary = "spread"; use zero = 1, or '
                    'vocabulary = "ends"'
                )
            optimizer.prepare(self._parts.book.owned)

        together(self.mesh.world, prepare)
        check_same(self.mesh, optimizer)
        self._optimizer = optimizer
        self._session.attach(Sharding(self.mesh, self._parts, self._programs.placement, optimizer))

    def detach(self, optimizer: ZeroOptimizer) -> None:
        """Undo `attach`; `ZeroOptimizer.close` calls it."""
        self._optimizer = None
        self._session.attach(None)

    def update(self, *parts: Kind) -> None:
        """Run an update program for the optimizer."""
        self._session.update(*parts)

    def norm_of(self, squares: Sequence[tuple[int, float]]) -> float:
        """The norm over all ranks, for the optimizer."""
        return norm_of(squares, self.mesh.world)

    def together(self, work: Callable[[], None]) -> None:
        """Do some work of the optimizer on every rank; a refusal on any of them is raised on all."""
        together(self.mesh.world, work)

    def memory(self) -> Memory:
        """Bytes of weights, gradients, moments and masters on this rank; of the last two as far as pipert has them."""
        if self._optimizer is not None:
            return self._optimizer.memory()
        held = [entry.parameter for entry in self._parts.book]
        return Memory(nbytes(p.detach() for p in held), nbytes(p.grad for p in held), 0, 0)

    # ---- what it looks like ----------------------------------------------------------------------------------------

    def table(self) -> str:
        """The stages with their first and last block, parameters, expected time and memory; how a search went."""
        lines = [self.partition.table()]
        if self.found is not None:
            lines.append(f"stages on ranks {self._programs.placement}; {self.found}")
        return "\n".join(lines)

    @property
    def found(self) -> Found | None:
        """The searched schedule for the usual number of micro-batches, its makespan and bound; None if by name."""
        plan = self._programs.plan
        return None if plan is None else plan.find(self._settings.microbatches)

    def measured_costs(self) -> Costs:
        """What each stage took in the last few steps, and what messages take now. Every rank calls it.

        Give them to another run, as ``AutoOptions(costs=…)``, or to the simulator. Where backwards were whole, they are
        divided as the blocks' expected times are.

        Raises:
            ConfigError: there was no step yet.
        """
        return self._design.planner.costs(self._recent(), self.partition, self._programs.placement)

    def replan(self, auto: AutoOptions | None = None) -> Found:
        """Search a schedule for the times that the last few steps took; the next steps follow it. Every rank calls it.

        The stages stay where they are. The schedule may be saved (`pipert.scheduler.formats.text.dumps`) and given to
        another run, with ``cuts=pipe.partition.counts``.

        Args:
            auto: memory limits and effort; default those of the pipeline.

        Raises:
            ConfigError: there was no step yet, or a rank has too little memory for one micro-batch.
        """
        placement = self._programs.placement
        self._programs.replace(self._design.planner.again(self._recent(), self.partition, placement, auto))
        self._session.forget_programs()
        self.proof = self._design.prove()
        assert self.found is not None
        return self.found

    def timeline(self) -> Timeline:
        """When every action of the last `step` ran, on the ranks of this pipeline. Every rank calls it.

        It has the same type as a simulated one: draw it, compare it. Waiting for messages is a gap before a
        computation.

        Raises:
            ConfigError: there was no step yet.
        """
        return self._recent(1)[-1]

    def _recent(self, most: int | None = None) -> list[Timeline]:
        """The timelines of the last few steps, oldest first."""
        timings = list(self._session.recent)
        if not timings:
            raise ConfigError("there is no timeline before the first step; call step first, on every rank")
        return [gather(self._programs.name, each, self.mesh.pp_group) for each in timings[-(most or len(timings)) :]]


@contextmanager
def evaluating(modules: Mapping[int, nn.Module]) -> Iterator[None]:
    """Put modules into evaluation mode, and each back into the mode in which it was."""
    modes = [(part, part.training) for module in modules.values() for part in module.modules()]
    try:
        for part, _ in modes:
            part.training = False
        yield
    finally:
        for part, training in modes:
            part.training = training
