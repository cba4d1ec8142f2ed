"""How a model says that its vocabulary may be spread over the ranks of a pipeline (docs/vocabulary.md).

Three things say it: the first block of a chain, that it looks rows up; the last, that it multiplies with one weight;
the loss, that it is a cross-entropy of tokens. torch's ``nn.Embedding`` and ``nn.Linear`` without a bias take part
without saying anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import nn


@dataclass(frozen=True)
class TokenLoss:
    """The mean over the tokens that count of ``lse - (1 - smoothing) x[target] - smoothing mean(x) + z_loss lse^2``.

    ``x`` are a token's logits, ``lse`` is ``log(sum(exp(x)))``.

    Attributes:
        ignore_index: the target that does not count.
        smoothing: share of the target's probability that is spread evenly over the vocabulary.
        z_loss: see the formula (Chowdhery et al. 2022, arXiv 2204.02311, section 5).
    """

    ignore_index: int = -100
    smoothing: float = 0.0
    z_loss: float = 0.0


@runtime_checkable
class SpreadsEmbedding(Protocol):
    """A first block that picks rows of ``weight``, shape (vocabulary, hidden), and may do something with them."""

    weight: nn.Parameter

    def after_lookup(self) -> nn.Module:
        """What is done with the rows: a module with the block's other parameters, under the same names."""
        ...


@runtime_checkable
class SpreadsHead(Protocol):
    """A last block that is ``x @ weight.T`` and nothing else; ``weight`` has shape (vocabulary, hidden)."""

    weight: nn.Parameter
    multiplies_only: bool


@runtime_checkable
class SpreadsLoss(Protocol):
    """A loss that can be computed from parts of the logits."""

    def token_loss(self) -> TokenLoss:
        """Which loss it is."""
        ...
