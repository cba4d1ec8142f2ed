"""Layers whose numbers do not depend on the layout: initial values, dropout, norms, tensor parallelism.

They compute with `pipert.hipkernels` where those are usable, else with torch's own functions.
"""

from __future__ import annotations

from pipert.layers.activation import gelu, swiglu
from pipert.layers.attention import Attention
from pipert.layers.cross_entropy import vocab_parallel_cross_entropy
from pipert.layers.dropout import Dropout, Part, name_layers
from pipert.layers.feed_forward import FeedForward
from pipert.layers.linear import Linear
from pipert.layers.materialise import materialise
from pipert.layers.norm import LayerNorm, RMSNorm
from pipert.layers.parallel_linear import ColumnParallelLinear, RowParallelLinear
from pipert.layers.parallelize import Split
from pipert.layers.shard import Shard, shard_of, to_full, to_shard
from pipert.layers.vocabulary import VocabParallelEmbedding, VocabParallelHead

__all__ = [
    "Attention",
    "ColumnParallelLinear",
    "Dropout",
    "FeedForward",
    "LayerNorm",
    "Linear",
    "Part",
    "RMSNorm",
    "RowParallelLinear",
    "Shard",
    "Split",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "gelu",
    "materialise",
    "name_layers",
    "shard_of",
    "swiglu",
    "to_full",
    "to_shard",
    "vocab_parallel_cross_entropy",
]
