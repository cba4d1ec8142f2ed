"""A vocabulary that every rank has a part of: what is left to cut, and how equal the stages get."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipert.errors import PartitionError
from pipert.gpt_config import GPTConfig
from pipert.graph.estimate import estimate
from pipert.graph.model_graph import Block, ModelGraph, ParameterSpec
from pipert.graph.trace import trace
from pipert.models.gpt import GPT
from pipert.partition import Partition, partition_graph


def llama(tied: bool = False) -> ModelGraph:
    """The figures of Llama-3 8B: 32 layers, hidden 4096, a vocabulary of 128,256."""
    shape = GPTConfig(
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        mlp=14336,
        sequence=8192,
        vocabulary=128_256,
        positions="rotary",
        norm="rmsnorm",
        activation="swiglu",
        bias=False,
        tied=tied,
    )
    return estimate(trace(GPT(shape)).graph)


@pytest.mark.parametrize(("stages", "ends"), [(8, 1.16), (16, 1.39), (32, 2.20)])
def test_spreading_makes_stages_equal_where_no_cut_can(stages: int, ends: float) -> None:
    """By the operations of the products alone; benchmarks/vocabulary.py counts those of attention, too."""
    graph = llama()
    best, spread = (partition_graph(graph, stages, spread_vocabulary=on) for on in (False, True))
    assert 1 / best.balance == pytest.approx(ends, abs=0.01)
    assert 1 / spread.balance < 1.025
    assert sum(stage.cost for stage in spread.stages) == pytest.approx(sum(stage.cost for stage in best.stages))


@pytest.mark.parametrize("tied", [False, True])
def test_rows_and_head_are_taken_out_and_counted_once(tied: bool) -> None:
    graph = llama(tied)
    cut = partition_graph(graph, 4, spread_vocabulary=True)
    assert cut.order == ("embedding", *(f"blocks.{i}" for i in range(32)), "norm")
    assert cut.vocabulary is not None
    assert (cut.vocabulary.embedding, cut.vocabulary.head) == ("embedding", "head")
    assert sum(stage.numel for stage in cut.stages) + cut.vocabulary.numel == graph.numel
    assert f"spread over all ranks: {cut.vocabulary.numel:,} parameters" in cut.table()
    assert Partition.from_json(cut.to_json()) == cut


def small(**changes: object) -> ModelGraph:
    table = ParameterSpec("a.weight", (5, 2), "float32", 4, "a.weight", lookup=True)
    head = ParameterSpec("c.weight", (5, 2), "float32", 4, "c.weight")
    inner = ParameterSpec("b.weight", (2, 2), "float32", 4, "b.weight")
    blocks = {
        "first": Block("a", parameters=(table,), forward=0.0, backward=0.0),
        "inner": Block("b", parameters=(inner,), forward=1.0, backward=2.0),
        "last": Block("c", parameters=(head,), forward=1.0, backward=2.0),
    }
    for name, value in changes.items():
        blocks[name] = replace(blocks[name], **value)  # type: ignore[arg-type]
    return ModelGraph.chain(blocks.values())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"first": {"parameters": ()}}, "the first with one table of rows to look up"),
        ({"last": {"parameters": ()}}, "the last with one weight to multiply with"),
        (
            {"last": {"parameters": (ParameterSpec("c.weight", (5, 3), "float32", 4, "c.weight"),)}},
            r"a.weight has shape \(5, 2\), c.weight \(5, 3\)",
        ),
        (
            {"inner": {"parameters": (ParameterSpec("b.weight", (5, 2), "float32", 4, "a.weight"),)}},
            "b.weight in between uses its weight, too",
        ),
        ({"last": {"forward": None}}, "block c has no cost"),
    ],
)
def test_models_without_such_ends_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(PartitionError, match=words):
        partition_graph(small(**changes), 1, spread_vocabulary=True)


def test_own_cuts_and_stage_counts_are_of_what_is_left() -> None:
    cut = partition_graph(small(), 2, spread_vocabulary=True, cuts=[1, 1])
    assert cut.assignment == (("a",), ("b",))
    assert [stage.cost for stage in cut.stages] == [1.5, 4.5]
    with pytest.raises(PartitionError, match="3 stages"):
        partition_graph(small(), 3, spread_vocabulary=True)
