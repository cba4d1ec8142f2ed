"""From a graph with costs to a partition: by hand, exactly, or by the stated heuristic."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from numbers import Integral

import numpy as np

from pipert.errors import PartitionError
from pipert.graph.model_graph import ModelGraph
from pipert.partition.chain import chain_cuts, check_stage_count
from pipert.partition.dag import DOWNSET_CAP, dag_cuts, is_total_order
from pipert.partition.limits import Memory, StageLimit, per_stage
from pipert.partition.partition import Partition, describe
from pipert.partition.vocabulary import take_vocabulary


def partition_graph(
    graph: ModelGraph,
    stages: int,
    *,
    limits: StageLimit | Sequence[StageLimit] | None = None,
    cuts: Sequence[int] | Sequence[str] | None = None,
    state: float = 4.0,
    downset_cap: int = DOWNSET_CAP,
    spread_vocabulary: bool = False,
) -> Partition:
    """Cut a model into stages: least bottleneck, then no stage empty, then least spread (see `chain_cuts`).

    A block weighs what its forward and backward of one micro-batch take. A graph in which every block feeds the next
    (a chain, with or without skip edges) is cut exactly; one with branches as `dag_cuts` says.

    Args:
        graph: with costs, from `profile` or `estimate`.
        stages: how many; ranks times chunks.
        limits: what stages may hold, one for all or one per stage.
        cuts: the user's own cuts: the number of blocks of each stage, or the first block of every stage but the first.
        state: bytes kept per byte of parameters (4: weights, gradients and two moments of the same type).
        downset_cap: see `dag_cuts`.
        spread_vocabulary: the rows of the embedding and the head are spread over all ranks (docs/vocabulary.md). Then
            only what is between them is cut, and every stage weighs an equal share of the head more.

    Raises:
        PartitionError: more stages than blocks, blocks without costs, limits that cannot be kept, cuts that do not fit.
    """
    if spread_vocabulary:
        rest, spread = take_vocabulary(graph)
        return partition_graph(rest, stages, limits=limits, cuts=cuts, state=state, downset_cap=downset_cap).plus(
            spread
        )
    check_stage_count(len(graph.blocks), stages)
    bounds, memory = per_stage(limits, stages), Memory(graph, state)
    costs = _known_costs(graph, bounds)
    if cuts is not None:
        assignment, method = _by_hand(graph, stages, cuts), "cuts given"
    else:
        assignment, method = _solve(graph, costs, bounds, memory, downset_cap)
    result = describe(graph, assignment, bounds, memory, method)
    _check_kept(result, bounds)
    return result


def _solve(
    graph: ModelGraph, costs: list[float], limits: tuple[StageLimit, ...], memory: Memory, cap: int
) -> tuple[list[list[str]], str]:
    names = [block.name for block in graph.blocks]
    stages = len(limits)
    try:
        if not is_total_order(graph):
            return dag_cuts(graph, costs, stages, limits, memory, cap)
        free = all(limit.memory is None and limit.blocks is None for limit in limits)
        places = chain_cuts(costs, stages, None if free else memory.reach(names, limits))
    except PartitionError as error:
        raise _explain(error, graph, limits, memory) from None
    return [names[a:b] for a, b in pairwise(places)], "exact"


def _by_hand(graph: ModelGraph, stages: int, cuts: Sequence[int] | Sequence[str]) -> list[list[str]]:
    """The user's cuts as names per stage, in the order of the graph."""
    names, n = [block.name for block in graph.blocks], len(graph.blocks)
    wishes = [cuts] if isinstance(cuts, str) else list(cuts)
    counts = [int(c) for c in wishes if isinstance(c, Integral)]
    if len(counts) == len(wishes):
        if len(counts) != stages or min(counts) < 1 or sum(counts) != n:
            raise PartitionError(
                f"cuts {counts} for {n} blocks on {stages} stages: give {stages} numbers >= 1 that add up to {n}"
            )
        ends = [sum(counts[: s + 1]) for s in range(stages)]
    else:
        firsts = [str(c) for c in wishes if str(c) != names[0]]
        unknown = [name for name in firsts if name not in graph.index]
        if unknown:
            raise PartitionError(f"cuts name unknown blocks {', '.join(unknown)}; blocks are {', '.join(names)}")
        starts = [graph.index[name] for name in firsts]
        if len(starts) != stages - 1 or starts != sorted(set(starts)):
            raise PartitionError(
                f"cuts {firsts} for {stages} stages: name the first block of each of the {stages - 1} stages after the "
                "first, in order"
            )
        ends = [*starts, n]
    return [names[a:b] for a, b in pairwise([0, *ends])]


def _known_costs(graph: ModelGraph, limits: Sequence[StageLimit]) -> list[float]:
    """Costs of all blocks; refuses a graph without what the limits need."""
    costs = [block.cost for block in graph.blocks]
    if None in costs:
        name = graph.blocks[costs.index(None)].name
        raise PartitionError(f"block {name} has no cost; profile the graph on an example, or estimate it")
    if any(limit.memory is not None for limit in limits):
        kept = [block.activation_bytes for block in graph.blocks]
        if None in kept:
            name = graph.blocks[kept.index(None)].name
            raise PartitionError(f"memory limits, but block {name} has no activation bytes; profile it on an example")
    return [cost for cost in costs if cost is not None]


def _check_kept(result: Partition, limits: Sequence[StageLimit]) -> None:
    """Only cuts given by hand can break a limit."""
    for s, (stage, limit) in enumerate(zip(result.stages, limits, strict=True)):
        if limit.memory is not None and stage.memory is not None and stage.memory > limit.memory:
            raise PartitionError(
                f"stage {s} ({stage.blocks[0]} .. {stage.blocks[-1]}) needs {stage.memory:,} bytes with "
                f"{limit.in_flight} micro-batches in flight, its limit is {limit.memory:,}; move cuts, raise the "
                "limit, or recompute activations"
            )
        if limit.blocks is not None and len(stage.blocks) > limit.blocks:
            raise PartitionError(f"stage {s} has {len(stage.blocks)} blocks, its limit is {limit.blocks}; move cuts")


def _explain(error: PartitionError, graph: ModelGraph, limits: Sequence[StageLimit], memory: Memory) -> PartitionError:
    """Add what stands in the way most plainly: a block that fits nowhere, or the sums."""
    if all(limit.memory is None and limit.blocks is None for limit in limits):
        return error
    places = [limit.blocks for limit in limits if limit.blocks is not None]
    if len(places) == len(limits) and sum(places) < len(graph.blocks):
        room_for = f"{len(graph.blocks)} blocks, the stages may hold {sum(places)} together"
        return PartitionError(f"{error}: {room_for}; use more stages, or raise the limits")
    if all(limit.memory is None for limit in limits):
        return error
    room = [limit.memory for limit in limits if limit.memory is not None]
    flights = sorted({limit.in_flight for limit in limits})
    if len(room) == len(limits):
        tied = [sum(memory.shared[g] for g in memory.groups.get(block.name, ())) for block in graph.blocks]
        takes = (memory.own + np.array(tied))[:, None] + memory.kept[:, None] * [limit.in_flight for limit in limits]
        over = takes - np.array(room)
        worst = int(over.min(axis=1).argmax())
        stage = int(over[worst].argmin())
        if over[worst, stage] > 0:
            return PartitionError(
                f"{error}: block {graph.blocks[worst].name} alone takes {takes[worst, stage]:,} bytes with "
                f"{limits[stage].in_flight} micro-batches in flight, more than any stage may hold (stage {stage}: "
                f"{room[stage]:,}); raise the limit, recompute activations, or use fewer micro-batches in flight"
            )
    least = int(memory.own.sum()) + sum(memory.shared)
    total = f"{sum(room):,} bytes together" if len(room) == len(limits) else "any number of bytes in some stages"
    span = f"{flights[0]} to {flights[-1]}" if len(flights) > 1 else f"{flights[0]}"
    return PartitionError(
        f"{error}: parameters and their state alone take {least:,} bytes, the stages may hold {total}, activations "
        f"come on top ({span} micro-batches in flight); use more stages, raise the limits, or recompute activations"
    )
