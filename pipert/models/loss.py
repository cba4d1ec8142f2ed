"""The loss of a language model: mean over the tokens that count."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F

import pipert.hipkernels as hk
from pipert.comm.transport import Transport
from pipert.errors import ConfigError
from pipert.layers import vocab_parallel_cross_entropy
from pipert.layers.spread import TokenLoss

IGNORE = -100


def token_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int = IGNORE,
    *,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """Mean of ``-log softmax(logits)[target]`` in nats over the targets that are not ``ignore_index``.

    Computed in float32 at least. With no target that counts, the loss is 0 and so are the gradients (not NaN).

    Args:
        logits: shape (..., vocabulary).
        targets: int64, shape (...); each in ``[0, vocabulary)`` or ``ignore_index``.
        ignore_index: the target that does not count.
        smoothing: share of the target's probability that is spread evenly over the vocabulary.
        z_loss: adds ``z_loss * log(sum(exp(logits)))**2`` to the loss of a token (Chowdhery et al. 2022, section 5).

    Returns:
        a scalar.
    """
    flat = targets.reshape(-1)
    if hk.usable(logits) and targets.dtype == torch.int64 and not z_loss:
        total = hk.cross_entropy(logits, targets, ignore_index=ignore_index, smoothing=smoothing).sum()
    else:
        wide = (logits if logits.dtype == torch.float64 else logits.float()).reshape(-1, logits.shape[-1])
        total = F.cross_entropy(wide, flat, ignore_index=ignore_index, reduction="sum", label_smoothing=smoothing)
        if z_loss:
            total = total + z_loss * wide.logsumexp(-1).square().masked_fill(flat == ignore_index, 0.0).sum()
    return total / (flat != ignore_index).sum().clamp(min=1)


class CausalLMLoss:
    """`token_cross_entropy` with the attribute ``ignore_index`` that `pipert.Pipeline` weighs micro-batches by.

    Targets are the next tokens already: the data shifts them, the loss does not.

    Args:
        ignore_index: the target that does not count.
        smoothing: see `token_cross_entropy`.
        z_loss: likewise.

    Raises:
        ConfigError: ``smoothing`` is no share.
    """

    uses_global_random = False  # so the engine need not seed torch's generator around it
    uses_kernels = True

    def __init__(self, ignore_index: int = IGNORE, *, smoothing: float = 0.0, z_loss: float = 0.0) -> None:
        if not 0.0 <= smoothing <= 1.0:
            raise ConfigError(f"smoothing {smoothing} is not between 0 and 1")
        self.ignore_index, self.smoothing, self.z_loss = ignore_index, smoothing, z_loss

    def token_loss(self) -> TokenLoss:
        """The same as a value, for a vocabulary that is spread over ranks; see `pipert.layers.spread`."""
        return TokenLoss(self.ignore_index, self.smoothing, self.z_loss)

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Logits (B, T, V) and targets (B, T) to a scalar."""
        return token_cross_entropy(logits, targets, self.ignore_index, smoothing=self.smoothing, z_loss=self.z_loss)

    def example_targets(self, logits: torch.Tensor) -> torch.Tensor:
        """Any targets for these logits, with which `pipert.Pipeline` measures how long the loss takes."""
        return torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)

    def over_vocabulary(self, group: Transport, vocabulary: int) -> VocabParallelLMLoss:
        """The same loss for logits that are shared out among ranks; `pipert.Pipeline` asks for it where they are."""
        return VocabParallelLMLoss(self, group, vocabulary)


class VocabParallelLMLoss:
    """A `CausalLMLoss` of logits that are shared out among ranks (`pipert.layers.cross_entropy`); the same on each."""

    uses_global_random = False  # so the engine need not seed torch's generator around it

    def __init__(self, whole: CausalLMLoss, group: Transport, vocabulary: int) -> None:
        self.ignore_index = whole.ignore_index
        self._losses: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = partial(
            vocab_parallel_cross_entropy,
            vocabulary=vocabulary,
            group=group,
            ignore_index=whole.ignore_index,
            smoothing=whole.smoothing,
            z_loss=whole.z_loss,
        )

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Own logits (B, T, own ids) and targets (B, T) to a scalar."""
        return self._losses(logits, targets).sum() / (targets != self.ignore_index).sum().clamp(min=1)
