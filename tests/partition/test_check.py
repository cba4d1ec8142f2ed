from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import nn

from pipert.errors import PartitionError
from pipert.graph import TracedModel, estimate, stage_module, trace
from pipert.partition import check_stages, partition_graph


class Tied(nn.Module):
    """A chain whose head uses the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 61, bias=False)
        self.head.weight = self.embedding.weight

    def blocks(self) -> list[tuple[str, nn.Module]]:
        inner = [(f"layers.{i}", layer) for i, layer in enumerate(self.layers)]
        return [("embedding", self.embedding), *inner, ("head", self.head)]


def built(traced: TracedModel, assignment: tuple[tuple[str, ...], ...]) -> list[dict[str, int]]:
    modules = [stage_module(traced, s, assignment) for s in range(len(assignment))]
    return [{name: p.numel() for name, p in module.named_parameters()} for module in modules]


@pytest.mark.parametrize("stages", [1, 2, 3, 6])
def test_built_stages_hold_the_models_parameters_and_tied_duplicates(stages: int) -> None:
    model = Tied()
    traced = trace(model)
    found = partition_graph(estimate(traced.graph), stages)
    counts = built(traced, found.assignment)
    check_stages(traced.graph, found.assignment, counts)
    assert [sum(count.values()) for count in counts] == [stage.numel for stage in found.stages]
    whole = sum(p.numel() for p in model.parameters())
    assert sum(sum(count.values()) for count in counts) == whole + (61 * 8 if stages > 1 else 0)


def test_every_way_to_cut_adds_up() -> None:
    traced = trace(Tied())
    names = list(traced.blocks)
    for cuts in combinations(range(1, 6), 2):
        places = [0, *cuts, 6]
        assignment = tuple(tuple(names[places[s] : places[s + 1]]) for s in range(3))
        check_stages(traced.graph, assignment, built(traced, assignment))


def test_what_is_lost_doubled_or_resized_is_named() -> None:
    traced = trace(Tied())
    assignment = partition_graph(estimate(traced.graph), 2).assignment
    good = built(traced, assignment)
    lost = [{k: v for k, v in good[0].items() if k != "layers.1.bias"}, good[1]]
    with pytest.raises(
        PartitionError,
        match=r"stage 0 lacks: layers.1.bias; it holds .* parameters, not .* of the model.* build each stage",
    ):
        check_stages(traced.graph, assignment, lost)
    with pytest.raises(PartitionError, match="stage 1 does not own: extra"):
        check_stages(traced.graph, assignment, [good[0], {**good[1], "extra": 1}])
    with pytest.raises(PartitionError, match=r"stage 0 has in another size: embedding.weight"):
        check_stages(traced.graph, assignment, [{**good[0], "embedding.weight": 64 * 8}, good[1]])
    with pytest.raises(PartitionError, match="1 built stages for a partition into 2"):
        check_stages(traced.graph, assignment, good[:1])


def test_a_tied_weight_that_became_two_is_refused() -> None:
    model = Tied()
    traced = trace(model)
    whole = (tuple(traced.blocks),)
    with torch.no_grad():
        model.head.weight = nn.Parameter(model.embedding.weight.clone())
    with pytest.raises(PartitionError, match=r"stage 0 holds twice: embedding.weight and head.weight"):
        check_stages(traced.graph, whole, built(traced, whole))


def test_a_block_in_two_stages_or_in_none_does_not_add_up() -> None:
    traced = trace(Tied())
    names = list(traced.blocks)
    for assignment in ((tuple(names[:3]), tuple(names[2:])), (tuple(names[:3]), tuple(names[4:]))):
        parts = [[traced.graph.blocks[traced.graph.index[name]] for name in part] for part in assignment]
        counts = [{p.name: p.numel for block in part for p in block.parameters} for part in parts]
        with pytest.raises(PartitionError, match="every block must be in exactly one stage"):
            check_stages(traced.graph, assignment, counts)
