"""Stages' times, from their blocks' or from a measured step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipert.engine.links import Link
from pipert.graph.model_graph import ModelGraph
from pipert.partition.partition import Partition
from pipert.report.measured import measured_costs
from pipert.scheduler.action import Kind
from pipert.scheduler.costs import Costs
from pipert.scheduler.placement import Placement
from pipert.scheduler.timeline import Timeline

#: Seconds that the runtime itself takes for an action (`benchmarks/pipeline.py` measures it).
ACTION = 1e-4


def stage_costs(
    graph: ModelGraph, partition: Partition, placement: Placement, links: Sequence[Link], recompute: bool = False
) -> Costs:
    """What each stage takes, from its blocks' times.

    The first stage with trainable parameters sends no gradient back, so its backward is a second half altogether.
    Measured times get the runtime's own on top, estimated ones have no unit to add it in.
    """
    own = ACTION if graph.costs == "measured" else 0.0
    stages = partition.stages
    again = [stage.forward if recompute else 0.0 for stage in stages]
    backward = [(stage.backward and stage.backward + own + more) for stage, more in zip(stages, again, strict=True)]
    weights = [min(sum(_second_half(graph, name) for name in stage.blocks), stage.backward) for stage in stages]
    first = next((number for number, stage in enumerate(stages) if stage.backward), len(stages))
    halves = enumerate(zip(backward, weights, strict=True))
    inputs = [0.0 if number <= first else whole - weight for number, (whole, weight) in halves]
    seconds = [whole - half for whole, half in zip(backward, inputs, strict=True)]
    comm = [_hop(graph, partition, placement, links, cut) for cut in range(1, len(stages))]
    return Costs([stage.forward + own for stage in stages], backward, inputs, seconds, comm=[*comm, 0.0])


def measured_stage_costs(timelines: Sequence[Timeline], expected: Costs, num_stages: int) -> Costs:
    """What each stage took in some steps; whole backwards divided as expected, messages as expected.

    The least time of an action counts, as for blocks that are measured alone: whatever disturbs a step makes it longer,
    now on one rank, now on another, and a schedule must not be made for that.
    """
    measured, wanted = measured_costs(timelines, num_stages, min).table(num_stages), expected.table(num_stages)
    inputs, weights = measured[Kind.I].copy(), measured[Kind.W].copy()
    split = np.array(
        [any(a.kind is Kind.W and a.stage == s for each in timelines for _, a, _, _ in each) for s in range(num_stages)]
    )
    total = wanted[Kind.I] + wanted[Kind.W]
    share = np.divide(wanted[Kind.W], total, out=np.full(num_stages, 0.5), where=total > 0)
    whole = np.where(split, np.maximum(measured[Kind.B], inputs + weights), measured[Kind.B])
    weights = np.where(split, weights, share * whole)
    inputs = np.where(split, inputs, whole - weights)
    forward, backward, first, second = (row.tolist() for row in (measured[Kind.F], whole, inputs, weights))
    shards = (measured[kind].tolist() for kind in (Kind.S, Kind.T, Kind.G))
    names = ("logits", "head_gradient", "embedding_gradient")
    return Costs(forward, backward, first, second, comm=expected.comm, **dict(zip(names, shards, strict=True)))


def _second_half(graph: ModelGraph, name: str) -> float:
    block = graph.blocks[graph.index[name]]
    return (block.backward or 0.0) / 2 if block.weight_gradient is None else block.weight_gradient


def _hop(graph: ModelGraph, partition: Partition, placement: Placement, links: Sequence[Link], cut: int) -> float:
    """Seconds of a message over a cut; 0 where nothing is known."""
    sender, receiver = placement.owners[cut - 1 : cut + 1]
    if not links or sender == receiver:
        return 0.0
    before = {name for stage in partition.stages[:cut] for name in stage.blocks}
    nbytes = sum(e.nbytes or 0 for e in graph.edges if e.source in before and e.target not in before)
    link = links[sender if receiver == (sender + 1) % placement.num_ranks else receiver]
    return link.seconds(nbytes)
