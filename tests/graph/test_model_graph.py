from __future__ import annotations

import networkx
import pytest

from pipert.errors import GraphError
from pipert.graph import INPUT, OUTPUT, Block, Edge, ModelGraph, ParameterSpec, TensorSpec


def weight(name: str, identity: str, *shape: int) -> ParameterSpec:
    return ParameterSpec(name, shape, "float32", 4, identity)


def model() -> ModelGraph:
    shared = "embedding.weight"
    blocks = (
        Block("embedding", "Embedding", (weight("embedding.weight", shared, 61, 8),), 0, 0.1, 0.2, 64),
        Block("middle", "Linear", (weight("middle.weight", "middle.weight", 8, 8),), 16, 0.3, 0.4, 32),
        Block("head", "Linear", (weight("head.weight", shared, 61, 8),)),
    )
    tensors = (TensorSpec((2, 8), "float32", 4, True), TensorSpec((2, 3), "bool", 1))
    edges = (
        Edge("embedding", "middle", tensors),
        Edge("middle", "head"),
        Edge("embedding", "head"),
        Edge(INPUT, "head"),
        Edge("middle", OUTPUT),
    )
    return ModelGraph(blocks, edges, "measured")


def test_a_graph_counts_parameters_once_and_bytes_by_type() -> None:
    graph = model()
    assert graph.numel == 61 * 8 + 8 * 8
    assert [b.parameter_bytes for b in graph.blocks] == [61 * 8 * 4, 8 * 8 * 4, 61 * 8 * 4]
    assert graph.edges[0].nbytes == 2 * 8 * 4 + 6
    assert graph.edges[1].nbytes is None
    assert graph.blocks[1].cost == pytest.approx(0.7)
    assert graph.blocks[2].cost is None


def test_tied_parameters_are_groups_with_a_name_in_each_block() -> None:
    (group,) = model().tied
    assert group.identity == "embedding.weight"
    assert group.blocks == ("embedding", "head")
    assert group.names == ("embedding.weight", "head.weight")
    assert (group.numel, group.nbytes) == (488, 1952)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"edges": [], "blocks": [{}]}', '{"edges": [1], "blocks": []}'])
def test_a_text_that_is_no_graph_is_refused(text: str) -> None:
    with pytest.raises(GraphError, match=r"this text is not a model graph .*; write one with ModelGraph.to_json"):
        ModelGraph.from_json(text)


def test_a_graph_is_a_value_that_comes_back_from_its_text() -> None:
    again = ModelGraph.from_json(model().to_json())
    assert again == model()
    assert hash(again) == hash(model())


def test_a_graph_is_a_networkx_graph_of_its_blocks() -> None:
    network = model().network
    assert list(network.nodes) == ["embedding", "middle", "head"]
    assert set(network.edges) == {("embedding", "middle"), ("middle", "head"), ("embedding", "head")}
    assert network.nodes["middle"]["block"] == model().blocks[1]
    assert network.edges["embedding", "middle"]["edge"].nbytes == 70
    assert networkx.is_directed_acyclic_graph(network)
    with pytest.raises(networkx.NetworkXError):
        network.add_node("more")


def test_a_chain_is_known_as_one() -> None:
    assert ModelGraph.chain(model().blocks).is_chain
    assert ModelGraph.chain(model().blocks[:1]).is_chain
    assert not model().is_chain


def test_costs_can_be_given() -> None:
    graph = model().with_costs([1, 2, 3], [4, 5, 6])
    assert [b.cost for b in graph.blocks] == [5, 7, 9]
    assert graph.costs == "given"
    with pytest.raises(GraphError, match="2 forward and 3 backward times for 3 blocks"):
        model().with_costs([1, 2], [1, 2, 3])


@pytest.mark.parametrize(
    ("blocks", "edges", "reason"),
    [
        ("", "", "0 blocks"),
        ("aba", "", "named twice: a"),
        ("ab", "ac", "a -> c names a block that the graph does not have"),
        ("ab", "ba", "b -> a runs against the order"),
        ("ab", "aa", "a -> a runs against the order"),
    ],
)
def test_a_graph_that_is_none_is_refused(blocks: str, edges: str, reason: str) -> None:
    with pytest.raises(GraphError, match=reason):
        ModelGraph(tuple(Block(name) for name in blocks), tuple(Edge(*pair) for pair in [edges] if pair))
