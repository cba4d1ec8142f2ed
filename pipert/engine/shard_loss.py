"""The loss of logits of which every rank has those of some token ids, and its gradients.

Letters in names: N tokens, V the token ids of this rank, H hidden, R ranks.

One pass over the logits is enough (Yeung et al. 2024, arXiv 2411.05288, algorithm 2): with each rank's own largest
logit m and exponentials e = exp(x - m), the input gradient needs only ``e @ W``, which a number for each token scales
when everybody's statistics are known.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from pipert.layers.spread import TokenLoss

#: For each token: the largest logit, the sum of exponentials, the target's logit, the sum of logits.
STATISTICS = 4


@dataclass
class ShardScores:
    """What a rank keeps of a micro-batch between S and T.

    Attributes:
        x_NH: the input.
        e_NV: ``exp(x @ W.T - m)``, in the type of the product.
        product_NH: ``e @ W``; None where no input gradient is wanted.
        own_4N: this rank's statistics, float32 at least.
    """

    x_NH: torch.Tensor
    e_NV: torch.Tensor
    product_NH: torch.Tensor | None
    own_4N: torch.Tensor


@dataclass(frozen=True)
class HeadRows:
    """A rank's rows of the head.

    Attributes:
        weight_VH: the rows.
        start: the first one's token id.
        whole: the number of token ids.
        loss: which loss.
    """

    weight_VH: torch.Tensor
    start: int
    whole: int
    loss: TokenLoss

    def places(self, targets_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For each token the place of its target among the rows, and whether it is there."""
        places_N = targets_N - self.start
        here_N = (places_N >= 0) & (places_N < len(self.weight_VH))
        return torch.where(here_N, places_N, 0), here_N


def score(head: HeadRows, x_NH: torch.Tensor, targets_N: torch.Tensor, gradient: bool) -> ShardScores:
    """S: this rank's logits, and what follows from them alone."""
    logits_NV = F.linear(x_NH, head.weight_VH)
    wide_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    places_N, here_N = head.places(targets_N)
    target_N = wide_NV.gather(1, places_N[:, None])[:, 0] * here_N
    largest_N = wide_NV.amax(1)
    sum_N = wide_NV.sum(1) if head.loss.smoothing else torch.zeros_like(largest_N)
    e_NV = torch.exp(wide_NV - largest_N[:, None])
    own_4N = torch.stack([largest_N, e_NV.sum(1), target_N, sum_N])
    e_NV = e_NV.to(logits_NV.dtype)
    product_NH = torch.mm(e_NV, head.weight_VH.to(e_NV.dtype)) if gradient else None
    return ShardScores(x_NH, e_NV, product_NH, own_4N)


@dataclass(frozen=True)
class Totals:
    """What all ranks know of a micro-batch's tokens once they have everybody's statistics.

    Attributes:
        lse_N: ``log(sum(exp(x)))`` over all token ids.
        loss_N: each token's loss, 0 where it does not count.
        counts_N: whether it counts.
    """

    lse_N: torch.Tensor
    loss_N: torch.Tensor
    counts_N: torch.Tensor

    @property
    def mean(self) -> torch.Tensor:
        """The mean loss of the tokens that count; 0 if none does."""
        return self.loss_N.sum() / self.counts_N.sum().clamp(min=1)

    def share(self, weight: float) -> torch.Tensor:
        """The weight of each token where the micro-batch's mean has this one, shape (N,)."""
        counts_N = self.counts_N.to(self.lse_N.dtype)
        return counts_N * (weight / counts_N.sum().clamp(min=1))


def combine(loss: TokenLoss, whole: int, everybody_R4N: torch.Tensor, targets_N: torch.Tensor) -> Totals:
    """From every rank's statistics to the loss of each token."""
    largest_RN, exponentials_RN, target_RN, sum_RN = everybody_R4N.unbind(1)
    largest_N = largest_RN.amax(0)
    lse_N = largest_N + (exponentials_RN * torch.exp(largest_RN - largest_N)).sum(0).log()
    loss_N = lse_N - (1.0 - loss.smoothing) * target_RN.sum(0)
    if loss.smoothing:
        loss_N = loss_N - (loss.smoothing / whole) * sum_RN.sum(0)
    if loss.z_loss:
        loss_N = loss_N + loss.z_loss * lse_N.square()
    counts_N = targets_N != loss.ignore_index
    return Totals(lse_N, loss_N.masked_fill(~counts_N, 0.0), counts_N)


def _factor(head: HeadRows, scores: ShardScores, totals: Totals, share_N: torch.Tensor) -> torch.Tensor:
    """What turns ``e`` into the first term of the logits' gradient: ``softmax(x) = e * exp(m - lse)``."""
    softmax_N = torch.exp(scores.own_4N[0] - totals.lse_N)
    return share_N * (1.0 + 2.0 * head.loss.z_loss * totals.lse_N) * softmax_N


def input_gradient(
    head: HeadRows, scores: ShardScores, totals: Totals, share_N: torch.Tensor, targets_N: torch.Tensor
) -> torch.Tensor:
    """SUM_H: this rank's part of the gradient of the head's input, shape (N, H), in the weight's type."""
    assert scores.product_NH is not None
    factor_N = _factor(head, scores, totals, share_N)
    places_N, here_N = head.places(targets_N)
    gradient_NH = scores.product_NH * factor_N[:, None]
    gradient_NH -= head.weight_VH[places_N] * (here_N * share_N * (1.0 - head.loss.smoothing))[:, None]
    if head.loss.smoothing:
        wide = factor_N.dtype
        mean_H = head.weight_VH.sum(0, dtype=wide) * (head.loss.smoothing / head.whole)
        gradient_NH -= share_N[:, None] * mean_H
    return gradient_NH.to(head.weight_VH.dtype)


def weight_gradient(
    head: HeadRows, scores: ShardScores, totals: Totals, share_N: torch.Tensor, targets_N: torch.Tensor
) -> torch.Tensor:
    """T: the gradient of this rank's rows, shape (V, H)."""
    factor_N = _factor(head, scores, totals, share_N)
    places_N, here_N = head.places(targets_N)
    gradient_NV = scores.e_NV * factor_N[:, None]
    target_N1 = (here_N * share_N * (1.0 - head.loss.smoothing))[:, None]
    gradient_NV.scatter_add_(1, places_N[:, None], -target_N1.to(gradient_NV.dtype))
    if head.loss.smoothing:
        gradient_NV -= share_N[:, None] * (head.loss.smoothing / head.whole)
    return torch.mm(gradient_NV.to(scores.e_NV.dtype).t(), scores.x_NH.to(scores.e_NV.dtype))
