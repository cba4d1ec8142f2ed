from __future__ import annotations

import pytest

from pipert.errors import PartitionError
from pipert.graph import Block, Edge, ModelGraph, ParameterSpec, TensorSpec
from pipert.partition import Partition, StageLimit, partition_graph


def model() -> ModelGraph:
    weight = ParameterSpec("embedding.weight", (1000, 8), "float32", 4, "embedding.weight", lookup=True)
    tied = ParameterSpec("head.weight", (1000, 8), "float32", 4, "embedding.weight")
    blocks = [
        Block("embedding", "Embedding", (weight,), 0, 0.0005, 0.0005, 1024),
        *(Block(f"blocks.{i}", "Toy", (), 0, 0.001, 0.002, 2048) for i in range(4)),
        Block("head", "Linear", (tied,), 0, 0.002, 0.003, 4096),
    ]
    chain = ModelGraph.chain(blocks, "measured")
    skip = Edge("blocks.0", "head", (TensorSpec((16, 8), "float32", 4),))
    return ModelGraph(chain.blocks, (*chain.edges, skip), "measured")


def test_the_table_lists_stages_and_the_skip_edges_that_cross_cuts() -> None:
    found = partition_graph(model(), 3, limits=[StageLimit(2**20, 3 - s) for s in range(3)])
    assert (
        found.table()
        == """\
stage  first block  last block  blocks  parameters           time                  memory
0      embedding    blocks.1         3       8,000  7 ms (38.9 %)  140.00 KiB of 1.00 MiB
1      blocks.2     blocks.3         2           0  6 ms (33.3 %)    8.00 KiB of 1.00 MiB
2      head         head             1       8,000  5 ms (27.8 %)  129.00 KiB of 1.00 MiB
exact; costs measured; balance 85.7 %
skip edge blocks.0 -> head over stages 0-2"""
    )
    assert str(found) == found.table()
    assert found.rows()[0][:3] == ("stage", "first block", "last block")


def test_estimated_costs_are_shown_as_shares_and_unknown_memory_as_unknown() -> None:
    graph = ModelGraph.chain(
        [Block("a", forward=1.0, backward=2.0), Block("b", forward=0.5, backward=0.5)], "estimated"
    )
    rows = partition_graph(graph, 2).rows()
    assert [row[5:] for row in rows[1:]] == [("75.0 %", "?"), ("25.0 %", "?")]


def test_a_partition_is_a_value_that_comes_back_from_its_text() -> None:
    found = partition_graph(model(), 3)
    again = Partition.from_json(found.to_json())
    assert again == found
    assert hash(again) == hash(found)
    assert partition_graph(model(), 3) == found


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"stages": [{"blocks": 3}]}', '{"stages": [{}], "skips": []}'])
def test_a_text_that_is_no_partition_is_refused(text: str) -> None:
    with pytest.raises(PartitionError, match=r"this text is no partition .*; write one with Partition.to_json"):
        Partition.from_json(text)


def test_a_partition_knows_where_blocks_are() -> None:
    found = partition_graph(model(), 3)
    assert found.stage_of("blocks.2") == 1
    assert found.order == tuple(b.name for b in model().blocks)
    assert found.counts == (3, 2, 1)
    with pytest.raises(PartitionError, match="no stage holds block 'nose'"):
        found.stage_of("nose")


def test_its_counts_are_cuts_that_give_it_back() -> None:
    found = partition_graph(model(), 3)
    assert partition_graph(model(), 3, cuts=found.counts).assignment == found.assignment
