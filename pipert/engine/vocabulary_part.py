"""What one rank holds of a vocabulary that is spread over all ranks of the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipert.errors import BatchError
from pipert.layers.shard import Shard
from pipert.layers.spread import TokenLoss


@dataclass(frozen=True, eq=False)
class VocabularyPart:
    """What one rank holds of a spread vocabulary.

    Attributes:
        embedding: its rows of the embedding, shape (rows, hidden).
        head: its rows of the head; the same object where the two are tied.
        shard: which rows they are; zeros behind them have no token id, and nothing ever computes with them.
        loss: which loss.
        names: what the two are called in the model.
        home: the stage whose number its actions carry.
    """

    embedding: torch.nn.Parameter
    head: torch.nn.Parameter
    shard: Shard
    loss: TokenLoss
    names: tuple[str, str]
    home: int

    @property
    def whole(self) -> int:
        """The number of token ids."""
        return self.shard.whole[0]

    @property
    def start(self) -> int:
        """The token id of the first row."""
        return self.shard.spans[0].start

    def rows(self, weight: torch.nn.Parameter) -> torch.Tensor:
        """The rows of one of the two that have a token id."""
        return weight.detach()[: self.shard.filled]

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """By name, each once."""
        tied = self.head is self.embedding
        return dict(zip(self.names[: 1 if tied else 2], (self.embedding, self.head), strict=False))

    @property
    def trained(self) -> tuple[bool, bool]:
        """Whether embedding and head are trainable now."""
        return self.embedding.requires_grad, self.head.requires_grad

    def check(self, ids: Sequence[Any], targets: Sequence[Any]) -> None:
        """Refuse a batch that is not token ids and targets of this vocabulary.

        Raises:
            BatchError: the message names the first that is not.
        """
        for what, values in (("inputs", ids), ("targets", targets)):
            for microbatch, value in enumerate(values):
                where = f"the {what} of micro-batch {microbatch}"
                whole = isinstance(value, torch.Tensor) and not value.is_floating_point() and not value.is_complex()
                if not whole:
                    raise BatchError(f"{where} are no tensor of token ids; a spread vocabulary takes nothing else")
                counted = value[value != self.loss.ignore_index] if what == "targets" else value
                if counted.numel() and not 0 <= int(counted.min()) <= int(counted.max()) < self.whole:
                    wrong = int(counted.min()) if int(counted.min()) < 0 else int(counted.max())
                    raise BatchError(f"{where} hold {wrong}; token ids are 0 to {self.whole - 1}")
