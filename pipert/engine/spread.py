"""From a model to the parts of a spread vocabulary: what is taken out of its blocks, and this rank's rows."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

from torch import nn

from pipert.engine.settings import Settings
from pipert.engine.vocabulary_part import VocabularyPart
from pipert.errors import ConfigError
from pipert.graph.model_graph import ModelGraph
from pipert.graph.stage import StageBlock, TracedModel
from pipert.layers.initial import Initialises
from pipert.layers.materialise import materialise
from pipert.layers.shard import Shard, set_shard, shard_of, sharded_parameter
from pipert.layers.spread import SpreadsEmbedding, SpreadsHead, SpreadsLoss
from pipert.optim.precision import accumulate
from pipert.partition.vocabulary import take_vocabulary

RULE = "leave out vocabulary='spread', or see pipert.layers.spread for what a model must say to take part"


@dataclass(frozen=True, eq=False)
class SpreadModel:
    """A model whose vocabulary is spread.

    Attributes:
        rest: what is cut into stages.
        graph: of the rest, with costs.
        embedding: the block that was the first.
        head: the block that was the last.
    """

    rest: TracedModel
    graph: ModelGraph
    embedding: StageBlock
    head: StageBlock

    @classmethod
    def of(cls, traced: TracedModel, graph: ModelGraph, ranks: int, loss_fn: object) -> SpreadModel:
        """Take the vocabulary out.

        Raises:
            ConfigError: embedding, head or loss do not say that they can be spread, or there are more ranks than ids.
            PartitionError: the model is not built so.
        """
        blocks = list(traced.blocks.values())
        first, last = blocks[0], blocks[-1]
        rest, _ = take_vocabulary(graph)
        after = _after_lookup(first)
        if not _multiplies_only(last.module):
            raise ConfigError(
                f"the last block, {last.name} ({_kind(last)}), does not say that it only multiplies; {RULE}"
            )
        if not isinstance(loss_fn, SpreadsLoss):
            raise ConfigError(
                f"loss_fn = {loss_fn!r:.60} does not say that it can be computed from parts of the logits; use "
                f"pipert.models.CausalLMLoss; {RULE}"
            )
        ids = first.module.get_parameter("weight").shape[0]
        if not (empty := _shard(first, ranks - 1, ranks)).filled:
            raise ConfigError(
                f"a vocabulary of {ids} over pp = {ranks} ranks is {empty.size} rows each, which leaves none for the "
                "last; use fewer ranks"
            )
        inner = {first.name: replace(first, module=after), **{block.name: block for block in blocks[1:-1]}}
        return cls(replace(traced, graph=rest, blocks=inner), rest, first, last)

    def part(self, rank: int, ranks: int, home: int, settings: Settings) -> VocabularyPart:
        """What a rank holds: equal numbers of rows, the last ones padded with zeros where they do not divide.

        Raises:
            ConfigError: the weights are on the meta device and cannot be initialised.
        """
        assert isinstance(settings.loss_fn, SpreadsLoss)
        tied = self.embedding.module.get_parameter("weight") is self.head.module.get_parameter("weight")
        shard = _shard(self.embedding, rank, ranks)
        embedding = _rows(self.embedding, shard, settings)
        head = embedding if tied else _rows(self.head, shard, settings)
        names = self.embedding.path("weight"), self.head.path("weight")
        return VocabularyPart(embedding, head, shard, settings.loss_fn.token_loss(), names, home)


def _shard(block: StageBlock, rank: int, ranks: int) -> Shard:
    return Shard(tuple(block.module.get_parameter("weight").shape), 0, ranks, rank, padded=True)


def _after_lookup(block: StageBlock) -> nn.Module:
    module = block.module
    if isinstance(module, SpreadsEmbedding):
        return module.after_lookup()
    if type(module) is nn.Embedding:
        special = (module.max_norm, module.sparse or None, module.scale_grad_by_freq or None, module.padding_idx)
        if special == (None,) * 4:
            return nn.Identity()
    raise ConfigError(f"the first block, {block.name} ({_kind(block)}), does not say that it looks rows up; {RULE}")


def _multiplies_only(module: nn.Module) -> bool:
    said = isinstance(module, SpreadsHead) and module.multiplies_only
    return said or (type(module) is nn.Linear and module.bias is None)


def _kind(block: StageBlock) -> str:
    return type(block.module).__name__


def _rows(block: StageBlock, shard: Shard, settings: Settings) -> nn.Parameter:
    """A rank's rows of a block's weight as a parameter; where the block can, no others are ever made."""
    weight, name = block.module.get_parameter("weight"), block.prefix.rstrip(".")
    trainable = weight.requires_grad
    if weight.is_meta:
        module = copy.deepcopy(block.module)
        if isinstance(module, Initialises):
            module.weight = sharded_parameter(weight, shard)
        materialise(module, name, "cpu", settings.dtype, settings.seed)
        weight = module.get_parameter("weight")
    rows = weight.detach() if shard_of(weight) == shard else shard.take(weight.detach())
    parameter = nn.Parameter(rows.to(device=settings.device, dtype=settings.dtype), trainable)
    set_shard(parameter, shard)
    accumulate([parameter], settings.precision)
    return parameter
