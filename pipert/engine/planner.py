"""Planner: finds an `AutoPlan` for the model's blocks, or for what the stages took in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from pipert.comm.mesh import Mesh
from pipert.engine.auto import AutoOptions, AutoPlan, limits_of
from pipert.engine.balance import balanced_counts, tilted_counts
from pipert.engine.links import Link, measure_links
from pipert.engine.refusals import together
from pipert.engine.settings import Settings
from pipert.engine.stage_costs import measured_stage_costs, stage_costs
from pipert.errors import ConfigError
from pipert.graph.model_graph import ModelGraph
from pipert.partition.partition import Partition
from pipert.partition.solve import partition_graph
from pipert.scheduler.bounds import lower_bound
from pipert.scheduler.costs import Costs
from pipert.scheduler.placement import Placement
from pipert.scheduler.semantics import Semantics
from pipert.scheduler.timeline import Timeline


class Planner:
    """Searches schedules for one pipeline; every rank makes the same calls, and gets what rank 0 found.

    Args:
        mesh: all ranks.
        settings: the user's.
        graph: the model, with costs.
        semantics: the transport's message rules.
    """

    def __init__(self, mesh: Mesh, settings: Settings, graph: ModelGraph, semantics: Semantics) -> None:
        self._mesh, self._settings, self._graph, self._semantics = mesh, settings, graph, semantics
        self._options = settings.auto or AutoOptions()

    def choose(self) -> AutoPlan:
        """The fastest plan over all placements that there may be.

        Raises:
            PartitionError, ScheduleError: no placement fits the model, or its cuts.
            ConfigError: a rank has too little memory for one micro-batch, or memory cannot be judged.
        """
        links = self._links()
        return self._agreed(lambda: self._fastest(self._plans(links)))

    def again(
        self, timelines: Sequence[Timeline], partition: Partition, placement: Placement, options: AutoOptions | None
    ) -> AutoPlan:
        """A plan with the same placement for the times of some steps; raises as `choose`."""
        costs = self.costs(timelines, partition, placement)

        def plan() -> AutoPlan:
            made = self._plan(partition, placement, costs, options or self._options)
            self._usual(made)
            return made

        return self._agreed(plan)

    def costs(self, timelines: Sequence[Timeline], partition: Partition, placement: Placement) -> Costs:
        """What each stage took in some steps, and what messages take now."""
        return measured_stage_costs(
            timelines, self._expected(partition, placement, self._links()), placement.num_stages
        )

    def _plans(self, links: Sequence[Link]) -> list[AutoPlan]:
        """One for each placement for which there is enough memory."""
        settings, graph, options, ranks = self._settings, self._graph, self._options, self._mesh.pp
        wanted = _stages_of(settings.cuts, options.costs)
        usable = [p for p in _placements(ranks, settings.chunks, options.placements) if wanted in (None, p.num_stages)]
        if not usable:
            raise ConfigError(
                f"schedule 'auto' with pp = {ranks}, chunks = {settings.chunks}, placements = {options.placements} has "
                f"none with {wanted or 'any'} stages; use other chunks, placements, cuts or costs"
            )
        plans: list[AutoPlan] = []
        refusals: list[ConfigError] = []
        places = [p for p in usable if p.num_stages <= len(graph.blocks)] or usable[:1]
        level = [(placement, self._cut(placement)) for placement in places]
        tilted = [(placement, other) for placement, cut in level for other in self._tilted(placement, cut)]
        for placement, partition in level + tilted:
            costs = options.costs or self._expected(partition, placement, links)
            try:
                plans.append(self._plan(partition, placement, costs, options))
            except ConfigError as error:
                refusals.append(error)
        if not plans:
            raise refusals[0]
        return plans

    def _cut(self, placement: Placement) -> Partition:
        cuts, graph = self._settings.cuts, self._graph
        partition = partition_graph(graph, placement.num_stages, cuts=cuts)
        if not self._is_free(partition):
            return partition
        counts = balanced_counts(graph, partition, placement)
        return partition if counts == partition.counts else partition_graph(graph, placement.num_stages, cuts=counts)

    def _tilted(self, placement: Placement, partition: Partition) -> list[Partition]:
        """Cuts by which ranks may wait less."""
        others = tilted_counts(partition, placement) if self._is_free(partition) else ()
        return [partition_graph(self._graph, placement.num_stages, cuts=counts) for counts in others]

    def _is_free(self, partition: Partition) -> bool:
        """Whether the blocks may be cut elsewhere: nobody has said where, and their order is the model's."""
        names = tuple(block.name for block in self._graph.blocks)
        return self._settings.cuts is None and partition.order == names

    def _fastest(self, plans: Sequence[AutoPlan]) -> AutoPlan:
        """The plan with the least makespan; those that cannot have it are not searched."""
        best, least = plans[0], self._usual(plans[0])
        for plan in plans[1:]:
            bound = lower_bound(plan.costs, plan.placement, self._settings.microbatches, plan.limits)
            if bound < least and self._usual(plan) < least:
                best, least = plan, self._usual(plan)
        return best

    def _plan(self, partition: Partition, placement: Placement, costs: Costs, options: AutoOptions) -> AutoPlan:
        limits = limits_of(partition, placement, options)
        cuts = partition.counts if partition.method == "cuts given" else None
        return AutoPlan(costs, placement, cuts, limits, self._semantics, options.effort)

    def _usual(self, plan: AutoPlan) -> float:
        return plan.find(self._settings.microbatches).makespan

    def _expected(self, partition: Partition, placement: Placement, links: Sequence[Link]) -> Costs:
        return stage_costs(self._graph, partition, placement, links, self._settings.recompute != "none")

    def _links(self) -> tuple[Link, ...]:
        """How long messages take, where sizes are known."""
        sizes = [edge.nbytes for edge in self._graph.edges if edge.nbytes is not None]
        where = self._settings.device or torch.device("cpu")
        return measure_links(self._mesh.pp_group, max(sizes), where) if sizes else ()

    def _agreed(self, plan: Callable[[], AutoPlan]) -> AutoPlan:
        """Rank 0's plan, on every rank."""
        world = self._mesh.world
        text = together(world, lambda: "" if world.rank else plan().to_json())
        return AutoPlan.from_json(world.exchange(text.encode())[0].decode(), self._semantics)


def _placements(ranks: int, chunks: int, shapes: Sequence[str]) -> Iterator[Placement]:
    if chunks == 1 and "flat" in shapes:
        yield Placement.linear(ranks)
    if chunks <= 2 and "v" in shapes and ranks > 1:
        yield Placement.v(ranks)
    if "looped" in shapes and ranks > 1:
        yield Placement.looped(ranks, max(2, chunks))


def _stages_of(cuts: Sequence[Any] | None, costs: Costs | None) -> int | None:
    """How many stages the user's cuts or costs are for; None if for any number."""
    if costs is not None and costs.stages is not None:
        return costs.stages
    if cuts is None:
        return None
    return len(cuts) if all(isinstance(cut, int) for cut in cuts) else len(cuts) + 1
