"""The loss of a language model: mean over the tokens that count."""

from __future__ import annotations

import torch
from torch.nn import functional as F

import pipert.hipkernels as hk

IGNORE = -100


def token_cross_entropy(logits: torch.Tensor, targets: torch.Tensor, ignore_index: int = IGNORE) -> torch.Tensor:
    """Mean of ``-log softmax(logits)[target]`` in nats over the targets that are not ``ignore_index``.

    Computed in float32 at least. With no target that counts, the loss is 0 and so are the gradients (not NaN).

    Args:
        logits: shape (..., vocabulary).
        targets: int64, shape (...); each in ``[0, vocabulary)`` or ``ignore_index``.
        ignore_index: the target that does not count.

    Returns:
        a scalar.
    """
    if hk.usable(logits) and targets.dtype == torch.int64:
        total = hk.cross_entropy(logits, targets, ignore_index=ignore_index).sum()
    else:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        total = F.cross_entropy(
            wide.reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=ignore_index, reduction="sum"
        )
    return total / (targets != ignore_index).sum().clamp(min=1)


class CausalLMLoss:
    """`token_cross_entropy` with the attribute ``ignore_index`` that `pipert.Pipeline` weighs micro-batches by.

    Targets are the next tokens already: the data shifts them, the loss does not.
    """

    uses_global_random = False  # so the engine need not seed torch's generator around it
    uses_kernels = True

    def __init__(self, ignore_index: int = IGNORE) -> None:
        self.ignore_index = ignore_index

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Logits (B, T, V) and targets (B, T) to a scalar."""
        return token_cross_entropy(logits, targets, self.ignore_index)
