"""Cross-entropy of logits that are shared out among tensor-parallel ranks by the ids of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch

from pipert.comm.single import SingleTransport
from pipert.comm.transport import Transport
from pipert.errors import BatchError, ConfigError
from pipert.hipkernels import (
    cross_entropy_gradient_,
    cross_entropy_losses,
    cross_entropy_statistics,
    cross_entropy_sums,
)
from pipert.layers.shard import Shard
from pipert.randomness import letting_go

IGNORE = -100


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocabulary: int,
    group: Transport | None = None,
    ignore_index: int = IGNORE,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """Loss of every token, ``-log softmax(all logits)[target]``, in nats; bitwise the same on every rank.

    Communication, for N tokens: forward an all-reduce (max) of 4 N bytes and one (sum) of 12 N, twice that in float64;
    backward nothing. Logits never travel.

    Args:
        logits: (..., own ids), padded ids last, as `pipert.layers.VocabParallelHead` gives them.
        targets: int64, shape (...), in [0, vocabulary) or ``ignore_index``; the same on every rank.
        vocabulary: ids of all ranks.
        group: the ranks, in the order of their ids; None for one alone.
        ignore_index: such a token has loss 0 and no gradient.
        smoothing: share of the target's probability that is spread evenly over the vocabulary.
        z_loss: adds ``z_loss * log(sum(exp(logits)))**2`` to the loss of a token (Chowdhery et al. 2022, section 5).

    Returns:
        float32 (float64 for float64 logits), shape (...).

    Raises:
        ConfigError: ``smoothing`` is no share, or the logits are not this rank's part of the vocabulary.
        BatchError: a target outside the vocabulary (on a GPU its loss is NaN).
    """
    group = group or SingleTransport()
    if not 0.0 <= smoothing <= 1.0:
        raise ConfigError(f"smoothing {smoothing} is not between 0 and 1")
    shard = Shard((vocabulary,), 0, group.size, group.rank, padded=True)
    if logits.shape[-1] != shard.size:
        raise ConfigError(
            f"logits of {logits.shape[-1]} ids on a rank, but a vocabulary of {vocabulary} on {group.size} ranks makes "
            f"{shard.size}; give the logits of VocabParallelHead(gather_output=False)"
        )
    _check_targets(targets, vocabulary, ignore_index)
    flat = logits.reshape(-1, logits.shape[-1])
    options = (ignore_index, float(smoothing), float(z_loss))
    losses: torch.Tensor = _CrossEntropy.apply(flat, targets.reshape(-1), shard, group, *options)  # type: ignore[no-untyped-call]
    return losses.reshape(targets.shape)


def _check_targets(targets: torch.Tensor, vocabulary: int, ignore_index: int) -> None:
    if targets.device.type != "cpu":
        return
    wrong = targets[((targets < 0) | (targets >= vocabulary)) & (targets != ignore_index)]
    if wrong.numel():
        raise BatchError(
            f"target {int(wrong[0])} in a vocabulary of {vocabulary}; targets must be 0 .. {vocabulary - 1}, or "
            f"{ignore_index} for tokens that do not count"
        )


class _CrossEntropy(torch.autograd.Function):
    """The three steps of `pipert.hipkernels.ops.cross_entropy`, with the ranks' sums between them."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        shard: Shard,
        group: Transport,
        ignore_index: int,
        smoothing: float,
        z_loss: float,
    ) -> torch.Tensor:
        maximum, sums = _sums(logits, targets, shard, group)
        losses = cross_entropy_losses(
            sums, maximum, targets, shard.whole[0], ignore_index=ignore_index, smoothing=smoothing
        )
        if z_loss:
            squares = (sums[0].log() + maximum).square()
            losses = losses + z_loss * squares.masked_fill(targets == ignore_index, 0.0)
        ctx.save_for_backward(logits, targets, maximum, sums[:1].clone())
        ctx.shard, ctx.ignore_index, ctx.smoothing, ctx.z_loss = shard, ignore_index, smoothing, z_loss
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, targets, maximum, sums = ctx.saved_tensors
        shard: Shard = ctx.shard
        if not shard.filled:
            return torch.zeros_like(logits), *[None] * 6
        if ctx.z_loss:  # its gradient is softmax's once more: as if the sum of powers were smaller
            sums = sums.clone()
            sums[0] /= 1.0 + 2.0 * ctx.z_loss * (sums[0].log() + maximum)
        of_logits = cross_entropy_gradient_(
            logits.clone(memory_format=torch.contiguous_format),
            targets,
            maximum,
            sums,
            gradient,
            first=shard.spans[0].start,
            columns=shard.filled,
            vocabulary=shard.whole[0],
            ignore_index=ctx.ignore_index,
            smoothing=ctx.smoothing,
        )
        return of_logits, *[None] * 6


def _sums(
    logits: torch.Tensor, targets: torch.Tensor, shard: Shard, group: Transport
) -> tuple[torch.Tensor, torch.Tensor]:
    """Over all ranks, for each token: the largest logit, and the sums that the loss is made of."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if shard.filled:
        first = shard.spans[0].start
        own = cross_entropy_statistics(logits.contiguous(), targets, first=first, vocabulary=shard.filled)
        maximum = own[0].clone()
    else:  # a rank of padding alone
        maximum = logits.new_full((len(logits),), float("-inf"), dtype=dtype)
    with letting_go():
        group.wait(group.iallreduce(maximum, "max"), "the largest logits of the loss")
    if shard.filled:
        sums = cross_entropy_sums(own, maximum, shard.filled)
    else:
        sums = logits.new_zeros((3, len(logits)), dtype=dtype)
    with letting_go():
        group.wait(group.iallreduce(sums), "the sums of the loss")
    return maximum, sums
