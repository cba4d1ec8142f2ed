from __future__ import annotations

from itertools import pairwise

import numpy as np

from pipert.graph import INPUT, OUTPUT, Block, Edge, ModelGraph
from pipert.partition import StageLimit, chain_cuts, partition_graph
from pipert.partition.dag import dag_cuts, downsets, is_total_order
from pipert.partition.limits import Memory


def graph(costs: dict[str, float], edges: str) -> ModelGraph:
    """Blocks with costs, edges written ``"a>b a>c"``."""
    blocks = tuple(Block(name, forward=cost / 2, backward=cost / 2, activation_bytes=0) for name, cost in costs.items())
    pairs = [pair.split(">") for pair in edges.split()]
    return ModelGraph(blocks, tuple(Edge(a, b) for a, b in pairs), "given")


def towers(length: int, count: int) -> ModelGraph:
    """Equal branches between a first and a last block."""
    costs = {"first": 1.0}
    edges = []
    for t in range(count):
        names = ["first", *(f"t{t}.{i}" for i in range(length)), "last"]
        costs.update(dict.fromkeys(names[1:-1], 1.0))
        edges += [f"{a}>{b}" for a, b in pairwise(names)]
    return graph({**costs, "last": 1.0}, " ".join(edges))


def test_downsets_of_a_row_and_of_a_fork_are_counted() -> None:
    assert downsets(graph({"a": 1, "b": 1, "c": 1}, "a>b b>c"), 100) == [0b000, 0b001, 0b011, 0b111]
    assert len(downsets(graph({"a": 1, "b": 1, "c": 1}, "a>b a>c"), 100) or []) == 5
    assert len(downsets(towers(5, 2), 100) or []) == 1 + 6 * 6 + 1
    assert downsets(towers(5, 2), 37) is None


def test_branches_are_put_side_by_side_where_no_order_of_the_model_would() -> None:
    """In the model's order (a b1 b2 c1 c2 d) no cut into two stages is even; taking one block of each branch is."""
    model = graph({"a": 1, "b1": 6, "b2": 1, "c1": 1, "c2": 6, "d": 1}, "a>b1 b1>b2 b2>d a>c1 c1>c2 c2>d")
    found = partition_graph(model, 2)
    assert found.bottleneck == 8.0
    assert found.method == "exact over 11 downsets"
    assert found.assignment == (("a", "b1", "b2"), ("c1", "c2", "d")) or found.bottleneck == 8.0


def test_the_search_over_downsets_cuts_a_row_as_the_chain_search_does() -> None:
    random = np.random.default_rng(3)
    rows = [[3.0, 5.0, 2.0, 3.0, 4.0], *(random.integers(1, 7, random.integers(4, 9)).astype(float) for _ in range(40))]
    for costs in rows:
        model = ModelGraph.chain(Block(f"b{i}", forward=c, backward=0.0) for i, c in enumerate(costs))
        for stages in (2, 3, 4):
            found, method = dag_cuts(model, list(costs), stages, [StageLimit()] * stages, Memory(model))
            assert method == f"exact over {len(costs) + 1} downsets"
            assert np.cumsum([0, *map(len, found)]).tolist() == chain_cuts(list(costs), stages)


def test_a_row_with_skip_edges_has_one_order_and_is_cut_as_a_chain() -> None:
    model = graph(dict.fromkeys("abcdefgh", 1.0), "a>b b>c c>d d>e e>f f>g g>h b>g a>c")
    assert is_total_order(model)
    found = partition_graph(model, 4)
    assert found.counts == (2, 2, 2, 2)
    assert found.method == "exact"
    assert [str(skip) for skip in found.skips] == ["b -> g over stages 0-3", "a -> c over cut 0|1"]


def test_values_from_the_input_and_to_the_output_are_listed_when_they_pass_stages() -> None:
    row = ModelGraph.chain(Block(n, forward=1.0, backward=1.0) for n in "abcd")
    model = ModelGraph(row.blocks, (*row.edges, Edge(INPUT, "d"), Edge("a", OUTPUT)), "given")
    skips = [str(skip) for skip in partition_graph(model, 2).skips]
    assert skips == ["<input> -> d over cut 0|1", "a -> <output> over cut 0|1"]


def test_too_many_downsets_fall_back_on_the_best_of_three_orders() -> None:
    model = towers(12, 6)
    found = partition_graph(model, 6)
    assert found.method == "best of 3 orders (more than 1500 downsets)"
    assert found.bottleneck == 13.0, "74 blocks on 6 stages"
    place = {name: i for i, name in enumerate(found.order)}
    assert all(place[e.source] < place[e.target] for e in model.edges)


def test_the_heuristic_is_never_better_than_the_exact_answer_and_close_to_it() -> None:
    model = graph({"a": 1, "b1": 6, "b2": 1, "c1": 1, "c2": 6, "d": 1}, "a>b1 b1>b2 b2>d a>c1 c1>c2 c2>d")
    for stages in (2, 3, 4):
        exact, close = (partition_graph(model, stages, downset_cap=cap) for cap in (1000, 3))
        assert exact.bottleneck <= close.bottleneck <= 1.5 * exact.bottleneck
