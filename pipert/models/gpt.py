"""A GPT as a chain of blocks: embedding, transformer blocks, norm, head.

Letters in names: B samples, T positions, H hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from pipert.errors import BatchError
from pipert.gpt_config import GPTConfig
from pipert.layers import Dropout, LayerNorm, RMSNorm, materialise, name_layers
from pipert.layers.initial import fill_normal
from pipert.layers.names import join
from pipert.models.attention import Attention
from pipert.models.mlp import MLP


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
    """A vector for each token, plus one for each position where positions are learned; then dropout."""

    uses_global_random = False  # so the engine need not seed torch's generator around it

    position: nn.Parameter | None

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
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

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Token ids (B, T) to vectors (B, T, H)."""
        positions = ids_BT.shape[1]
        if positions > self.config.sequence:
            raise BatchError(
                f"a sequence of {positions} tokens is longer than the model's {self.config.sequence}; "
                "raise `sequence` in the model's config, or cut the sequences"
            )
        x_BTH = F.embedding(ids_BT, self.weight)
        if self.position is not None:
            x_BTH = x_BTH + self.position[:positions]
        dropped_BTH: torch.Tensor = self.dropout(x_BTH)
        return dropped_BTH


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``, with dropout on what is added."""

    uses_global_random = False  # so the engine need not seed torch's generator around it

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config)
        self.attention_dropout = Dropout(config.dropout)
        self.mlp_norm = _norm(config)
        self.mlp = MLP(config)
        self.mlp_dropout = Dropout(config.dropout)

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        """Vectors (B, T, H) to the same."""
        added_BTH = self.attention_dropout(self.attention(self.attention_norm(x_BTH)))
        normed_BTH, x_BTH = self.mlp_norm(added_BTH, residual=x_BTH)
        y_BTH: torch.Tensor = self.mlp_dropout(self.mlp(normed_BTH), residual=x_BTH)
        return y_BTH


class Head(nn.Module):
    """Logits for each position: ``x @ weight.T``.

    A tied head has the embedding's weight, also on a rank that has no embedding: its initial values carry that name.
    """

    uses_global_random = False  # so the engine need not seed torch's generator around it

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.vocabulary, config.hidden))

    def init_parameters(self, seed: int, prefix: str) -> None:
        """Fill the weight; see `pipert.layers.initial.Initialises`."""
        name = "embedding.weight" if self.config.tied else join(prefix, "weight")
        fill_normal(self.weight, self.config.init_std, seed, name)

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        """Vectors (B, T, H) to logits (B, T, V)."""
        return F.linear(x_BTH, self.weight)


def _norm(config: GPTConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return RMSNorm(config.hidden, eps=config.norm_eps)
    return LayerNorm(config.hidden, eps=config.norm_eps, bias=config.bias)
