from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipert.errors import PartitionError
from pipert.graph import Block, Edge, ModelGraph, ParameterSpec
from pipert.partition import StageLimit, partition_graph
from tests.partition.brute_force import best, chains, dags, keeps, rank, taken


def block(name: str, cost: float = 1.0, numel: int = 0, tied: str | None = None, kept: int | None = 0) -> Block:
    own = ParameterSpec(f"{name}.weight", (numel,), "float32", 4, f"{name}.weight")
    shared = [] if tied is None else [ParameterSpec(f"{name}.tied", (10,), "float32", 4, tied)]
    return Block(name, "Toy", (own, *shared), 0, cost / 4, cost * 3 / 4, kept)


@st.composite
def graphs(draw: st.DrawFn, branches: bool) -> ModelGraph:
    n = draw(st.integers(1, 7 if branches else 9))
    names = [f"b{i}" for i in range(n)]
    tied = st.sampled_from([None, "embedding", "bias"])
    cost, numel, kept = st.integers(0, 9), st.integers(0, 20), st.integers(0, 60)
    blocks = tuple(block(m, float(draw(cost)), draw(numel), draw(tied), draw(kept)) for m in names)
    if not branches:
        return ModelGraph.chain(blocks)
    pairs = [(i, j) for i in range(n) for j in range(i + 1, n)]
    chosen = draw(st.lists(st.sampled_from(pairs), max_size=8, unique=True)) if pairs else []
    return ModelGraph(blocks, tuple(Edge(names[i], names[j]) for i, j in sorted(chosen)), "given")


@st.composite
def limits(draw: st.DrawFn, graph: ModelGraph, stages: int) -> list[StageLimit]:
    """None, one for all, or one each; memory is often just what some partition takes, or a byte less."""
    memory = st.one_of(st.none(), st.integers(0, 900))
    one = st.builds(StageLimit, memory, st.integers(0, 4), st.one_of(st.none(), st.integers(1, 4)))
    kind = draw(st.sampled_from(["none", "all", "each", "tight", "tight for all"]))
    if kind == "none":
        return [StageLimit()] * stages
    if kind == "all":
        return [draw(one)] * stages
    if kind == "each":
        return draw(st.lists(one, min_size=stages, max_size=stages))
    n = len(graph.blocks)
    cuts = sorted(draw(st.permutations(range(1, n)))[: stages - 1])
    places = [0, *cuts, n]
    flights = draw(st.lists(st.integers(0, 4), min_size=stages, max_size=stages))
    if kind == "tight for all":
        flights = flights[:1] * stages
    takes = [taken(graph, range(places[s], places[s + 1]), flights[s]) for s in range(stages)]
    if kind == "tight for all":
        takes = [max(takes)] * stages
    less = draw(st.sampled_from([0, 0, 0, 1]))
    return [StageLimit(max(0, take - less), flight) for take, flight in zip(takes, flights, strict=True)]


@settings(max_examples=300, deadline=None)
@given(st.booleans(), st.data())
def test_random_models_under_random_limits_are_cut_as_well_as_any_cut(branches: bool, data: st.DataObject) -> None:
    graph = data.draw(graphs(branches))
    stages = data.draw(st.integers(1, min(4, len(graph.blocks))))
    bounds = data.draw(limits(graph, stages))
    costs = [b.cost or 0.0 for b in graph.blocks]
    all_of_them = dags(graph, stages) if branches else chains(len(costs), stages)
    wanted = best(costs, all_of_them, lambda assignment: keeps(graph, assignment, bounds))
    if wanted[0] == inf:
        with pytest.raises(PartitionError, match="keeps the limits"):
            partition_graph(graph, stages, limits=bounds)
        return
    found = partition_graph(graph, stages, limits=bounds)
    assignment = [[graph.index[name] for name in names] for names in found.assignment]
    assert keeps(graph, assignment, bounds)
    assert sorted(i for part in assignment for i in part) == list(range(len(costs)))
    assert rank(costs, assignment) == pytest.approx(wanted, abs=1e-6)
    assert (found.bottleneck, found.spread) == pytest.approx(wanted, abs=1e-6)
    place = {name: i for i, name in enumerate(found.order)}
    assert all(place[e.source] < place[e.target] for e in graph.edges), "the order is topological"
    for stage, limit in zip(found.stages, bounds, strict=True):
        assert limit.memory is None or (stage.memory is not None and stage.memory <= limit.memory)


def test_in_flight_micro_batches_move_blocks_to_later_stages() -> None:
    """1F1B on 4 stages holds 4, 3, 2, 1 micro-batches: the first stage gets fewer blocks when memory is short."""
    graph = ModelGraph.chain(block(f"b{i}", kept=10) for i in range(12))
    bounds = [StageLimit(memory=90, in_flight=4 - s) for s in range(4)]
    assert partition_graph(graph, 4).counts == (3, 3, 3, 3)
    assert partition_graph(graph, 4, limits=bounds).counts == (2, 3, 4, 3)


def test_a_tied_weight_takes_memory_once_in_a_stage() -> None:
    blocks = [block("embedding", tied="embedding"), block("b"), block("head", tied="embedding")]
    graph = ModelGraph.chain(blocks)
    whole = partition_graph(graph, 1, limits=StageLimit(memory=4 * 40))
    assert whole.stages[0].memory == 4 * 40
    assert whole.stages[0].numel == graph.numel == 10
    apart = partition_graph(graph, 3)
    assert [stage.numel for stage in apart.stages] == [10, 0, 10]


def test_blocks_weigh_by_time_and_not_by_parameters() -> None:
    blocks = [block("embedding", 0.0, 10**9), *(block(f"b{i}", 1.0, 10) for i in range(7))]
    assert partition_graph(ModelGraph.chain(blocks), 2).counts == (5, 3)


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(
        PartitionError, match="3 blocks on 4 stages: every stage needs a block; use ranks x chunks of 1 to 3"
    ):
        partition_graph(ModelGraph.chain(block(f"b{i}") for i in range(3)), 4)


def test_a_block_that_fits_nowhere_is_named() -> None:
    graph = ModelGraph.chain([block("a", kept=10), block("huge", kept=100), block("c", kept=10)])
    with pytest.raises(PartitionError, match=r"block huge alone takes 100 bytes with 1 micro-batches.*stage 1: 99"):
        partition_graph(graph, 2, limits=[StageLimit(99, 2), StageLimit(99, 1)])


def test_limits_too_small_together_are_told_with_their_sums() -> None:
    graph = ModelGraph.chain(block(f"b{i}", numel=10) for i in range(4))
    with pytest.raises(
        PartitionError, match=r"take 640 bytes, the stages may hold 400 bytes together.*raise the limits"
    ):
        partition_graph(graph, 2, limits=StageLimit(memory=200))


def test_memory_limits_need_activation_bytes() -> None:
    graph = ModelGraph.chain([block("a", kept=None), block("b")])
    with pytest.raises(PartitionError, match="block a has no activation bytes; profile"):
        partition_graph(graph, 2, limits=StageLimit(memory=10**9))
    assert partition_graph(graph, 2).stages[0].memory is None


def test_blocks_without_a_cost_are_refused() -> None:
    with pytest.raises(PartitionError, match="block a has no cost; profile the graph on an example, or estimate it"):
        partition_graph(ModelGraph.chain([Block("a"), Block("b")]), 2)


@pytest.mark.parametrize("cuts", [[1, 3, 2], np.array([1, 3, 2]), ["b1", "b4"], ["b0", "b1", "b4"]])
def test_cuts_by_hand_are_counts_or_first_blocks(cuts: list[int] | list[str]) -> None:
    graph = ModelGraph.chain(block(f"b{i}") for i in range(6))
    found = partition_graph(graph, 3, cuts=cuts)
    assert found.counts == (1, 3, 2)
    assert found.method == "cuts given"


@pytest.mark.parametrize(
    ("cuts", "reason"),
    [
        ([3, 3], r"cuts \[3, 3\] for 6 blocks on 3 stages: give 3 numbers >= 1 that add up to 6"),
        ([3, 3, 1], "add up to 6"),
        ([6, 0, 0], "numbers >= 1"),
        (["b1"], "name the first block of each of the 2 stages"),
        (["b4", "b1"], "in order"),
        (["b1", "b1"], "in order"),
        (["b1", "x"], "unknown blocks x; blocks are b0, b1"),
        ([], "cuts"),
        ("b1", r"cuts \['b1'\] for 3 stages: name the first block of each"),
    ],
)
def test_cuts_by_hand_that_do_not_fit_are_refused(cuts: list[int] | list[str], reason: str) -> None:
    with pytest.raises(PartitionError, match=reason):
        partition_graph(ModelGraph.chain(block(f"b{i}") for i in range(6)), 3, cuts=cuts)


def test_cuts_by_hand_keep_limits_or_are_refused() -> None:
    graph = ModelGraph.chain(block(f"b{i}", kept=10) for i in range(6))
    bounds = [StageLimit(50, 2), StageLimit(50, 1)]
    assert partition_graph(graph, 2, cuts=[2, 4], limits=bounds).counts == (2, 4)
    with pytest.raises(PartitionError, match=r"stage 0 \(b0 .. b2\) needs 60 bytes with 2 micro-batches in flight"):
        partition_graph(graph, 2, cuts=[3, 3], limits=bounds)
    with pytest.raises(PartitionError, match="stage 1 has 4 blocks, its limit is 3"):
        partition_graph(graph, 2, cuts=[2, 4], limits=StageLimit(blocks=3))


def test_limits_must_be_one_for_all_or_one_for_each() -> None:
    graph = ModelGraph.chain(block(f"b{i}") for i in range(6))
    with pytest.raises(PartitionError, match="2 stage limits for 3 stages"):
        partition_graph(graph, 3, limits=[StageLimit()] * 2)
    with pytest.raises(PartitionError, match=r"limits = 5: give a StageLimit\(memory=..., in_flight=...\), or one per"):
        partition_graph(graph, 3, limits=5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ({"blocks": 0}, "blocks = 0 is no limit of a stage; it must be >= 1"),
        ({"memory": -1}, "memory = -1 is no limit of a stage; it must be >= 0"),
        ({"in_flight": -1}, "in_flight = -1"),
        ({"in_flight": None}, "in_flight = None is no limit of a stage; give a whole number$"),
        ({"memory": "80GB"}, "memory = '80GB' is no limit of a stage; give a whole number, or None for no limit"),
        ({"memory": float("inf")}, "or None for no limit"),
        ({"memory": float("nan")}, "memory = nan"),
        ({"blocks": 1.5}, "blocks = 1.5"),
    ],
)
def test_a_limit_that_is_none_is_refused(numbers: dict[str, Any], reason: str) -> None:
    with pytest.raises(PartitionError, match=reason):
        StageLimit(**numbers)


@pytest.mark.parametrize("memory", [80e9, np.int64(80), 10**30])
@pytest.mark.parametrize("blocks", [6, 6000])
def test_a_limit_may_be_written_as_a_float_and_be_larger_than_any_memory(memory: float, blocks: int) -> None:
    graph = ModelGraph.chain(block(f"b{i}", kept=1) for i in range(blocks))
    limit = StageLimit(memory=memory, in_flight=3)  # type: ignore[arg-type]
    wanted = (blocks // 2, blocks // 2) if memory > 80 or blocks == 6 else None
    if wanted is None:
        with pytest.raises(PartitionError, match="the stages may hold 160 bytes together"):
            partition_graph(graph, 2, limits=limit)
    else:
        assert partition_graph(graph, 2, limits=limit).counts == wanted


def test_limits_of_blocks_alone_are_told_without_a_word_on_memory() -> None:
    graph = ModelGraph.chain(block(f"b{i}") for i in range(6))
    with pytest.raises(
        PartitionError, match="keeps the limits: 6 blocks, the stages may hold 3 together; use more"
    ) as e:
        partition_graph(graph, 3, limits=StageLimit(blocks=1))
    assert "bytes" not in str(e.value)


@pytest.mark.parametrize("state", [-1, float("nan"), float("inf"), "4"])
def test_bytes_of_state_that_are_no_number_are_refused(state: float) -> None:
    with pytest.raises(PartitionError, match="state = "):
        partition_graph(ModelGraph.chain(block(f"b{i}") for i in range(6)), 3, state=state)
