"""A vocabulary spread over all ranks, as the partitioner sees it: blocks that weigh the same on every stage."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipert.errors import PartitionError
from pipert.graph.model_graph import Block, ModelGraph, ParameterSpec


@dataclass(frozen=True)
class SpreadVocabulary:
    """What every rank of a pipeline holds and does a part of.

    Attributes:
        embedding: name of the block whose rows are looked up; the rest of that block stays where it is.
        head: name of the last block, which is in no stage.
        forward: expected time of the head's forward of one micro-batch, all ranks together.
        backward: the same for the backward.
        numel: parameters, a weight that both use counted once.
    """

    embedding: str
    head: str
    forward: float
    backward: float
    numel: int

    def __str__(self) -> str:
        return f"{self.embedding} and {self.head} spread over all ranks: {self.numel:,} parameters"


def take_vocabulary(graph: ModelGraph) -> tuple[ModelGraph, SpreadVocabulary]:
    """Take the rows of the embedding and the head out of a model.

    Returns:
        the rest, which is cut into stages, and what was taken out.

    Raises:
        PartitionError: the model is no chain that begins with a lookup and ends with one product, or has no costs.
    """
    first, last = graph.blocks[0], graph.blocks[-1]
    rows = [spec for spec in first.parameters if spec.lookup and len(spec.shape) == 2]
    rows = [spec for spec in rows if spec.name.rpartition(".")[2] == "weight"]
    products = last.parameters
    if not graph.is_chain or len(graph.blocks) < 3 or len(rows) != 1 or len(products) != 1:
        raise PartitionError(
            f"the vocabulary of {first.name} .. {last.name} cannot be spread: the model must be a chain of three "
            "blocks or more, the first with one table of rows to look up, the last with one weight to multiply with"
        )
    if rows[0].shape != products[0].shape:
        raise PartitionError(
            f"the vocabulary cannot be spread: {rows[0].name} has shape {rows[0].shape}, {products[0].name} "
            f"{products[0].shape}; both must be (vocabulary, hidden)"
        )
    _check_untied(graph, {rows[0].identity, products[0].identity})
    if last.forward is None or last.backward is None:
        raise PartitionError(f"block {last.name} has no cost; profile the graph on an example, or estimate it")
    numel = rows[0].numel * len({rows[0].identity, products[0].identity})
    spread = SpreadVocabulary(first.name, last.name, last.forward, last.backward, numel)
    return ModelGraph.chain((_without(first, rows[0]), *graph.blocks[1:-1]), graph.costs), spread


def _without(block: Block, row: ParameterSpec) -> Block:
    return replace(block, parameters=tuple(spec for spec in block.parameters if spec is not row))


def _check_untied(graph: ModelGraph, identities: set[str]) -> None:
    inner = [spec for block in graph.blocks[1:-1] for spec in block.parameters if spec.identity in identities]
    if inner:
        raise PartitionError(f"the vocabulary cannot be spread: {inner[0].name} in between uses its weight, too")
