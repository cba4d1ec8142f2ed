"""A GPT as a chain of blocks: embedding, transformer blocks, norm, head.

Letters in names: B samples, T positions, H hidden, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from pipert.comm.single import SingleTransport
from pipert.comm.transport import Transport
from pipert.errors import BatchError, ConfigError
from pipert.gpt_config import GPTConfig
from pipert.layers import (
    Attention,
    Dropout,
    FeedForward,
    LayerNorm,
    RMSNorm,
    VocabParallelHead,
    materialise,
    name_layers,
)
from pipert.layers.collectives import own_part
from pipert.layers.dropout import Part
from pipert.layers.initial import fill_normal
from pipert.layers.names import join
from pipert.layers.shard import mark_partial, sharded_parameter
from pipert.layers.vocabulary import look_up, vocabulary_shard


class GPT(nn.Module):
    """A decoder-only transformer language model.

    Called on token ids (B, T) it returns logits (B, T, V). The same happens one block after the other along
    ``blocks()``, which is what a pipeline cuts.

    Initial values depend on the seed and each parameter's name only. On the meta device (the default) there are none
    yet: `pipert.Pipeline` materialises on each rank what that rank owns. For use in one process, name a real device.

    Args:
        config: the shape.
        device: where the parameters live.
        seed: seed of the initial values, when the device is a real one.
        dtype: dtype of the parameters; default float32.

    Example:
        >>> model = GPT(GPTConfig(layers=2, hidden=8, heads=2, sequence=16, vocabulary=61), device="cpu")
        >>> model(torch.zeros(3, 16, dtype=torch.int64)).shape
        torch.Size([3, 16, 61])
    """

    uses_global_random = False  # so the engine need not seed torch's generator around it

    def __init__(
        self,
        config: GPTConfig,
        device: torch.device | str = "meta",
        seed: int = 0,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):
            self.embedding = Embedding(config)
            # Registered by hand: as an attribute, `blocks` is the method through which pipelines see the chain.
            self._modules["blocks"] = nn.ModuleList(Block(config) for _ in range(config.layers))
            self.norm = _norm(config)
            self.head = Head(config)
        if config.tied:
            self.head.weight = self.embedding.weight
        name_layers(self)
        if torch.device(device).type != "meta":
            materialise(self, "", device, dtype, seed)
        elif dtype is not None:
            self.to(dtype)

    def blocks(self) -> list[tuple[str, nn.Module]]:
        """The chain: each block with its name in the model, in the order in which they are applied."""
        inner = [(f"blocks.{index}", block) for index, block in self._inner().named_children()]
        return [("embedding", self.embedding), *inner, ("norm", self.norm), ("head", self.head)]

    def _inner(self) -> nn.Module:
        inner = self._modules["blocks"]
        assert inner is not None
        return inner

    def check_tensor_parallel(self, ranks: int, *, sequence_parallel: bool = False) -> None:
        """Refuse a number of tensor-parallel ranks that cannot share this model; see `share_out`.

        Raises:
            ConfigError: they cannot; the message shows the divisions that leave something over.
        """
        problems = list(self.config.tensor_parallel_problems(ranks, sequence_parallel=sequence_parallel))
        if problems:
            raise ConfigError("\n".join(problems))

    def share_out(self, group: Transport, *, sequence_dim: int | None = None, overlap: bool = True) -> None:
        """Become this rank's part of the model, in place; it was whole. `pipert.parallelize` calls this.

        Args:
            group: the tensor-parallel ranks.
            sequence_dim: 1 where what runs between the blocks is shared out along the positions; None: it is whole.
            overlap: whether communication and computation overlap in the backward.
        """
        tied = self.head.weight is self.embedding.weight
        for module in self.modules():
            if isinstance(module, (Attention, FeedForward, VocabParallelHead)):
                module.share_out(group, sequence_dim=sequence_dim, overlap=overlap)
        self.embedding.share_out(group, sequence_dim=sequence_dim)
        if tied:
            self.head.weight = self.embedding.weight
        if sequence_dim is not None:
            self._see_parts(sequence_dim, group)

    def _see_parts(self, dim: int, group: Transport) -> None:
        """Norms and dropout see a part of the sequence."""
        for module in self.modules():
            if isinstance(module, (LayerNorm, RMSNorm)):
                for parameter in module.parameters():
                    mark_partial(parameter)
            elif isinstance(module, Dropout):
                module.part = Part(dim, group.rank, group.size)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Token ids (B, T), T at most ``config.sequence``, to logits (B, T, V)."""
        x = ids_BT
        for _, block in self.blocks():
            x = block(x)
        return x

    def get_submodule(self, target: str) -> nn.Module:
        """The module of this name, as in `nn.Module`; finds ``blocks.0`` beside the method ``blocks``."""
        child, _, rest = target.partition(".")
        return self._inner().get_submodule(rest) if child == "blocks" else super().get_submodule(target)


class Embedding(nn.Module):
    """A vector for each token, plus one for each position where positions are learned; then dropout.

    Tensor-parallel, each rank has the vectors of some token ids (`pipert.layers.VocabParallelEmbedding`).
    """

    uses_global_random = False  # so the engine need not seed torch's generator around it

    position: nn.Parameter | None

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.group: Transport = SingleTransport()
        self.sequence_dim: int | None = None
        self.weight = nn.Parameter(torch.empty(config.vocabulary, config.hidden))
        learned = config.positions == "learned"
        table = nn.Parameter(torch.empty(config.sequence, config.hidden)) if learned else None
        self.register_parameter("position", table)
        self.dropout = Dropout(config.dropout)

    def init_parameters(self, seed: int, prefix: str) -> None:
        """Fill both tables; see `pipert.layers.initial.Initialises`."""
        fill_normal(self.weight, self.config.init_std, seed, join(prefix, "weight"))
        if self.position is not None:
            fill_normal(self.position, self.config.init_std, seed, join(prefix, "position"))

    def share_out(self, group: Transport, *, sequence_dim: int | None = None) -> None:
        """Become this rank's part of the layer, in place; it was whole."""
        self.group, self.sequence_dim = group, sequence_dim
        shard = vocabulary_shard(self.config.vocabulary, self.config.hidden, group)
        self.weight = sharded_parameter(self.weight, shard)
        if sequence_dim is not None and self.position is not None:
            mark_partial(self.position)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Token ids (B, T) to vectors (B, T, H), or to this rank's part of them along T."""
        positions = ids_BT.shape[1]
        check_length(positions, self.config)
        self._check_parts(positions)
        x_BTH = look_up(ids_BT, self.weight, self.config.vocabulary, self.group, sequence_dim=self.sequence_dim)
        if self.position is not None:
            table_TH = self.position[:positions]
            x_BTH = x_BTH + (table_TH if self.sequence_dim is None else own_part(table_TH, 0, self.group))
        dropped_BTH: torch.Tensor = self.dropout(x_BTH)
        return dropped_BTH

    def _check_parts(self, positions: int) -> None:
        if self.sequence_dim is not None and positions % self.group.size:
            raise BatchError(
                f"a sequence of {positions} tokens / tp {self.group.size} leaves {positions % self.group.size} over; "
                "with sequence parallelism every rank needs as many positions: cut or pad the sequences, or train "
                "without it"
            )

    def after_lookup(self) -> nn.Module:
        """What is done with the looked-up vectors; see `pipert.layers.spread`."""
        return AfterLookup(self.config, self.position, self.dropout)


class AfterLookup(nn.Module):
    """The part of an `Embedding` behind the lookup, where the vocabulary is spread over all ranks of a pipeline."""

    uses_global_random = False  # so the engine need not seed torch's generator around it

    position: nn.Parameter | None

    def __init__(self, config: GPTConfig, position: nn.Parameter | None, dropout: Dropout) -> None:
        super().__init__()
        self.config = config
        self.register_parameter("position", position)
        self.dropout = dropout

    def init_parameters(self, seed: int, prefix: str) -> None:
        """Fill the table of positions; see `pipert.layers.initial.Initialises`."""
        if self.position is not None:
            fill_normal(self.position, self.config.init_std, seed, join(prefix, "position"))

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        """Looked-up vectors (B, T, H) to those of `Embedding`."""
        check_length(x_BTH.shape[1], self.config)
        if self.position is not None:
            x_BTH = x_BTH + self.position[: x_BTH.shape[1]]
        dropped_BTH: torch.Tensor = self.dropout(x_BTH)
        return dropped_BTH


def check_length(positions: int, config: GPTConfig) -> None:
    """Refuse a sequence that is longer than the model's.

    Raises:
        BatchError: it is.
    """
    if positions > config.sequence:
        raise BatchError(
            f"a sequence of {positions} tokens is longer than the model's {config.sequence}; "
            "raise `sequence` in the model's config, or cut the sequences"
        )


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``, with dropout on what is added."""

    uses_global_random = False  # so the engine need not seed torch's generator around it

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        out_std = config.init_std / math.sqrt(2 * config.layers)
        self.attention_norm = _norm(config)
        self.attention = Attention(
            config.hidden,
            config.heads,
            kv_heads=config.key_heads,
            bias=config.bias,
            rotary_base=config.rotary_base if config.positions == "rotary" else None,
            std=config.init_std,
            out_std=out_std,
        )
        self.attention_dropout = Dropout(config.dropout)
        self.mlp_norm = _norm(config)
        self.mlp = FeedForward(
            config.hidden,
            config.mlp_width,
            activation=config.activation,
            bias=config.bias,
            std=config.init_std,
            out_std=out_std,
        )
        self.mlp_dropout = Dropout(config.dropout)

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        """Vectors (B, T, H) to the same."""
        added_BTH = self.attention_dropout(self.attention(self.attention_norm(x_BTH)))
        normed_BTH, x_BTH = self.mlp_norm(added_BTH, residual=x_BTH)
        y_BTH: torch.Tensor = self.mlp_dropout(self.mlp(normed_BTH), residual=x_BTH)
        return y_BTH


class Head(VocabParallelHead):
    """Logits for each position: ``x @ weight.T``.

    A tied head has the embedding's weight, also on a rank that has no embedding: its initial values carry that name.
    """

    multiplies_only = True  # so it can be spread: see `pipert.layers.spread`

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config.hidden, config.vocabulary, std=config.init_std)
        self.config = config

    def init_parameters(self, seed: int, prefix: str) -> None:
        """Fill the weight; see `pipert.layers.initial.Initialises`."""
        super().init_parameters(seed, "embedding" if self.config.tied else prefix)


def _norm(config: GPTConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return RMSNorm(config.hidden, eps=config.norm_eps)
    return LayerNorm(config.hidden, eps=config.norm_eps, bias=config.bias)
