"""What is decided before a pipeline's first step: the stages, where they run, and that their program is safe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import nn

from pipert.comm.mesh import Mesh
from pipert.engine.build import build, weigh
from pipert.engine.loss import LossFunction, Widened
from pipert.engine.planner import Planner
from pipert.engine.programs import ProgramKey, Programs, ScheduleSource, kept_by_stage
from pipert.engine.recompute import per_stage
from pipert.engine.refusals import together
from pipert.engine.settings import Settings
from pipert.engine.spread import SpreadModel
from pipert.engine.stage import Stage, warm_up
from pipert.engine.tensor_parallel import check_model, over_vocabulary, shared_out
from pipert.errors import ConfigError
from pipert.graph.stage import TracedModel
from pipert.graph.trace import trace
from pipert.layers.shard import is_summed
from pipert.optim.precision import HALF, Precision
from pipert.partition.limits import StageLimit
from pipert.partition.partition import Partition
from pipert.partition.solve import partition_graph
from pipert.scheduler.action import Kind
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.semantics import Semantics
from pipert.scheduler.verify import Proof
from pipert.scheduler.vocabulary import Vocabulary


class Design:
    """From a model and settings to this rank's stages and their programs. Collective over the mesh.

    Trace, weigh, choose a schedule, cut, build: each is refused on all ranks alike, and nothing is allocated before
    everything that can be checked has been.

    Args:
        model: as for `pipert.Pipeline`.
        loss_fn: likewise.
        mesh: the ranks.
        settle: makes the settings; what it refuses is refused on all ranks.

    Attributes:
        settings: what the user said.
        programs: where programs come from.
        planner: searches schedules.
        graph: the model's blocks with their costs.
        partition: the stages.
        parts: what this rank built.
        spread: the embedding and head whose rows are spread over all ranks; None if they are not.
        device: where this rank computes.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction, mesh: Mesh, settle: Callable[[], Settings]) -> None:
        self._mesh = mesh
        together(mesh.world, lambda: check_model(model, mesh))
        part = shared_out(model, mesh)
        self._sums = mesh.dp > 1 or (mesh.tp > 1 and any(map(is_summed, part.parameters())))

        def decide() -> tuple[Settings, Programs | None, TracedModel]:
            self.settings = settings = settle()
            _check_vocabulary(settings, mesh)
            made = None
            if settings.schedule != "auto":
                made = self._make_programs(settings.schedule, settings.chunks)
                per_stage(settings.recompute, made.placement.num_stages)
            return settings, made, _in_dtype(trace(part, settings.example), settings.dtype)

        settings, programs, traced = together(mesh.world, decide)
        self._loss_fn, self._whole = over_vocabulary(traced, loss_fn)
        stages = mesh.pp if programs is None else programs.placement.num_stages
        self.graph = weigh(traced, settings, mesh, stages, halves=programs is None)
        self.spread = together(mesh.world, lambda: self._take_vocabulary(traced))
        cut = self.graph if self.spread is None else self.spread.graph
        self.planner = Planner(mesh, settings, cut, self._semantics)
        self.programs = programs or self._make_programs(self.planner.choose(), 1)
        placement = self.programs.placement
        self._recompute = together(mesh.world, lambda: per_stage(settings.recompute, placement.num_stages))
        self.partition: Partition = together(mesh.world, self._cut)
        mesh.pp_group.connect(pairwise(placement.owners))
        self.parts = build(traced, self.graph, self.partition.assignment, placement, mesh, settings, self.spread)
        self.device = settings.device or _device_of(self.parts.modules)

    def prove(self) -> Proof:
        """The proof of the usual step's program."""
        vocabulary = None if self.spread is None else Vocabulary()
        ties = tuple(tie.stages for tie in self.parts.ties)
        key = ProgramKey(self.settings.microbatches, 0, ties=ties, vocabulary=vocabulary)
        return together(self._mesh.world, lambda: self.programs.proof(key))

    def stages(self) -> dict[int, Stage]:
        """This rank's stages, ready to run."""
        together(self._mesh.world, lambda: warm_up(set(self._recompute) != {"none"}))
        last = self.programs.placement.num_stages - 1 if self.spread is None else None  # spread, no stage has the loss
        precision = self.settings.precision
        half = precision is not None and precision.parameters in HALF
        loss_fn = Widened(self._loss_fn) if half else self._loss_fn
        stages = {}
        for number, module in self.parts.modules.items():
            at_end = (loss_fn, self._whole) if number == last else (None, None)
            stages[number] = Stage(number, module, self.device, self._recompute[number], *at_end)
        return stages

    @property
    def has_fp16(self) -> bool:
        """Whether a loss scale is needed."""
        return any(spec.dtype == "float16" for block in self.graph.blocks for spec in block.parameters)

    def _make_programs(self, source: ScheduleSource, chunks: int) -> Programs:
        settings, spreads = self.settings, self.settings.vocabulary == "spread"
        return Programs(
            source,
            self._mesh.pp,
            settings.microbatches,
            chunks,
            self._semantics,
            self._sums,
            settings.offload,
            spreads,
        )

    @property
    def _semantics(self) -> Semantics:
        return Semantics(**self._mesh.pp_group.semantics)  # type: ignore[arg-type]

    def _take_vocabulary(self, traced: TracedModel) -> SpreadModel | None:
        if self.settings.vocabulary == "ends":
            return None
        return SpreadModel.of(traced, self.graph, self._mesh.pp, self.settings.loss_fn)

    def _cut(self) -> Partition:
        settings, stages = self.settings, self.programs.placement.num_stages
        keep = kept_by_stage(settings.offload, stages)
        lives = in_flight(self.programs.schedule(settings.microbatches))
        limits = [
            StageLimit(in_flight=min(live, keep.get(stage, live) + 1), recompute=mode)
            for stage, (live, mode) in enumerate(zip(lives, self._recompute, strict=True))
        ]
        precision = settings.precision or Precision()
        plan = self.programs.plan
        return partition_graph(
            self.graph,
            stages,
            cuts=settings.cuts if plan is None or plan.cuts is None else plan.cuts,
            limits=limits,
            state=precision.state_bytes() / precision.parameters.itemsize,
            spread_vocabulary=self.spread is not None,
        )


def in_flight(schedule: Schedule) -> list[int]:
    """For each stage the most micro-batches that are between their forward and the end of their backward at once."""
    split = any(Kind.W in row.kinds for row in schedule.rows)
    frees = Kind.W if split else Kind.B
    peaks = [1] * schedule.num_stages
    for row in schedule.rows:
        for stage in set(row.stages.tolist()):
            kinds = row.kinds[row.stages == stage].tolist()
            changes = ((kind == Kind.F) - (kind in (Kind.B, frees)) for kind in kinds)
            peaks[stage] = max(1, *accumulate(changes))
    return peaks


def _check_vocabulary(settings: Settings, mesh: Mesh) -> None:
    if settings.vocabulary == "spread" and mesh.tp > 1:
        raise ConfigError(
            f"vocabulary = 'spread' with tp = {mesh.tp}: the rows are shared out among tensor-parallel ranks already; "
            "use one of the two"
        )


def _in_dtype(traced: TracedModel, dtype: torch.dtype | None) -> TracedModel:
    if dtype is None:
        return traced
    name = str(dtype).removeprefix("torch.")
    return replace(traced, graph=traced.graph.in_dtype(name, dtype.itemsize))


def _device_of(modules: Mapping[int, nn.Module]) -> torch.device:
    return next((p.device for module in modules.values() for p in module.parameters()), torch.device("cpu"))
