"""A vocabulary shared out among tensor-parallel ranks: each has some of the ids, in the embedding and in the head.

Where the ranks do not divide the ids, the last ones hold rows of zeros that stand for no id: nothing looks them up, and
their logits are minus infinity, so their probability is exactly 0.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from pipert.comm.single import SingleTransport
from pipert.comm.transport import Transport
from pipert.errors import BatchError
from pipert.layers.collectives import all_gather, all_reduce, reduce_scatter
from pipert.layers.initial import draw_normal, fill_normal
from pipert.layers.materialise import fill_like, template
from pipert.layers.names import join
from pipert.layers.parallel_linear import column_linear
from pipert.layers.shard import Shard, Tied, set_shard, sharded_parameter


def vocabulary_shard(vocabulary: int, hidden: int, group: Transport) -> Shard:
    """The rows of a table (vocabulary, hidden) that a rank holds: equal parts, padded at the end."""
    return Shard((vocabulary, hidden), 0, group.size, group.rank, padded=True)


def look_up(
    ids: torch.Tensor,
    weight: torch.Tensor,
    vocabulary: int,
    group: Transport,
    *,
    sequence_dim: int | None = None,
    padding_idx: int | None = None,
) -> torch.Tensor:
    """Rows of a table that is shared out; see `VocabParallelEmbedding`.

    Raises:
        BatchError: an id outside the vocabulary (on a GPU: the device's own assertion).
    """
    check_ids(ids, vocabulary)
    if group.size == 1:
        return F.embedding(ids, weight, padding_idx)
    first = group.rank * len(weight)
    padding = None if padding_idx is None or not 0 <= padding_idx - first < len(weight) else padding_idx - first
    local = ids - first
    elsewhere = (local < 0) | (local >= len(weight))
    rows = F.embedding(local.masked_fill(elsewhere, 0), weight, padding).masked_fill(elsewhere[..., None], 0.0)
    return all_reduce(rows, group) if sequence_dim is None else reduce_scatter(rows, sequence_dim, group)


def check_ids(ids: torch.Tensor, vocabulary: int) -> None:
    """Refuse ids outside the vocabulary, also those that padded rows would stand for."""
    if not ids.numel() or ids.is_meta:
        return
    if ids.device.type != "cpu":
        torch._assert_async(((ids >= 0) & (ids < vocabulary)).all())
        return
    low, high = (int(value) for value in ids.aminmax())
    if low < 0 or high >= vocabulary:
        raise BatchError(
            f"token id {low if low < 0 else high} in a vocabulary of {vocabulary}; ids must be 0 .. {vocabulary - 1}"
        )


class _Table(nn.Module):
    """A weight (vocabulary, hidden) that is shared out by rows."""

    uses_global_random = False  # so the engine need not seed torch's generator around it

    def __init__(
        self,
        vocabulary: int,
        hidden: int,
        group: Transport | None,
        std: float,
        sequence_dim: int | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.vocabulary, self.hidden, self.std, self.sequence_dim = vocabulary, hidden, std, sequence_dim
        self.group = group or SingleTransport()
        self._like: tuple[nn.Module, ...] = ()
        self.weight = nn.Parameter(torch.empty(self._shard().shape, device=device, dtype=dtype))
        set_shard(self.weight, self._shard())
        draw_normal(self.weight, std)

    def _shard(self) -> Shard:
        return vocabulary_shard(self.vocabulary, self.hidden, self.group)

    def init_parameters(self, seed: int, prefix: str) -> None:
        """Fill the weight; see `pipert.layers.initial.Initialises`."""
        if self._like:
            fill_like(self, self._like[0], seed, prefix)
        else:
            fill_normal(self.weight, self.std, seed, join(prefix, "weight"))

    def adopt(self, module: nn.Module, tied: Tied | None = None) -> None:
        """Become a part of this whole layer: take its weight's part, or without values what it is to be."""
        self._like = template(module)
        self.weight = sharded_parameter(module.weight, self._shard(), tied)  # type: ignore[arg-type]
        self.train(module.training)


class VocabParallelEmbedding(_Table):
    """``weight[ids]``, where each rank has the rows of some ids.

    Every row comes from one rank, so the sum over the ranks is exact.

    Communication, for a result of S bytes whole: forward an all-reduce of S, backward nothing. With a ``sequence_dim``
    forward a reduce-scatter and backward an all-gather of S.

    Args:
        vocabulary: number of ids.
        hidden: size of a row.
        group: the ranks; None for one alone.
        std: standard deviation of the initial weights.
        sequence_dim: the dimension of the result that is shared out among the ranks; None: all get the whole.
        padding_idx: the id whose row gets no gradient.
        device: where the parameters live.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        vocabulary: int,
        hidden: int,
        *,
        group: Transport | None = None,
        std: float = 0.02,
        sequence_dim: int | None = None,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(vocabulary, hidden, group, std, sequence_dim, device, dtype)
        self.padding_idx = padding_idx

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids (...), the same on every rank, to rows (..., hidden)."""
        options = {"sequence_dim": self.sequence_dim, "padding_idx": self.padding_idx}
        return look_up(ids, self.weight, self.vocabulary, self.group, **options)


class VocabParallelHead(_Table):
    """Logits ``x @ weight.T``, where each rank has the rows of some ids.

    Communication, for x of S bytes whole: forward nothing, or with a ``sequence_dim`` an all-gather of S. Backward an
    all-reduce of S, or with a ``sequence_dim`` an all-gather and a reduce-scatter of S. With ``gather_output`` also an
    all-gather of the bytes of all logits forward; `pipert.layers.cross_entropy` does without.

    Args:
        hidden: width of x.
        vocabulary: number of ids.
        group: the ranks; None for one alone.
        std: standard deviation of the initial weights.
        sequence_dim: the dimension of x that is shared out among the ranks; None: every rank has the whole x.
        gather_output: give all logits on every rank; otherwise the rank's own, with minus infinity for padding.
        overlap: whether communication and computation overlap in the backward.
        device: where the parameters live.
        dtype: dtype of the parameters.
    """

    multiply = staticmethod(F.linear)  # so the engine may put weight gradients off

    def __init__(
        self,
        hidden: int,
        vocabulary: int,
        *,
        group: Transport | None = None,
        std: float = 0.02,
        sequence_dim: int | None = None,
        gather_output: bool = True,
        overlap: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(vocabulary, hidden, group, std, sequence_dim, device, dtype)
        self.gather_output, self.overlap = gather_output, overlap

    def share_out(self, group: Transport, *, sequence_dim: int | None = None, overlap: bool = True) -> None:
        """Become this rank's part of the layer, in place; it was whole."""
        self.group, self.sequence_dim, self.overlap = group, sequence_dim, overlap
        self.weight = sharded_parameter(self.weight, self._shard())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (..., hidden) to (..., vocabulary), or to (..., own ids)."""
        logits = column_linear(
            x,
            self.weight,
            None,
            self.group,
            sequence_dim=self.sequence_dim,
            overlap=self.overlap,
            multiply=self.multiply,
        )
        if self.group.size == 1:
            return logits
        if self.gather_output:
            return self.gather(logits)
        own = self._shard().filled
        if own < logits.shape[-1]:
            with torch.no_grad():  # in place, which costs nothing; these logits have no gradient
                logits[..., own:] = float("-inf")
        return logits

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """All logits, from every rank's own."""
        return all_gather(logits, -1, self.group)[..., : self.vocabulary] if self.group.size > 1 else logits
