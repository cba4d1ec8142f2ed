"""Run a pipeline with a spread vocabulary on threads, and put the rows of all ranks together again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from pipert.comm.local import run_ranks
from pipert.comm.mesh import Mesh
from pipert.engine.pipeline import Pipeline
from pipert.layers import Shard, shard_of, to_full
from pipert.layers.spread import TokenLoss
from tests.engine.world import Optimizer, Outcome

#: What a rank finds, its place among pipeline ranks and replicas, and which rows it holds of what is spread.
Found = tuple[Outcome, int, int, dict[str, Shard]]


@dataclass
class Smoothed:
    """A loss of tokens with everything that there may be, as one process computes it."""

    smoothing: float = 0.1
    z_loss: float = 0.01
    ignore_index: int = -100

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        rows, flat = logits.flatten(0, -2), targets.flatten()
        cross = F.cross_entropy(rows, flat, label_smoothing=self.smoothing, ignore_index=self.ignore_index)
        return cross + self.z_loss * rows.logsumexp(-1).square()[flat != self.ignore_index].mean()

    def token_loss(self) -> TokenLoss:
        return TokenLoss(self.ignore_index, self.smoothing, self.z_loss)


def run_spread(
    model: nn.Module,
    loss_fn: Any,
    steps: Sequence[Sequence[Any]],
    pp: int,
    dp: int = 1,
    *,
    optimizer: Optimizer | None = None,
    transport: dict[str, Any] | None = None,
    before: Callable[[Pipeline], None] | None = None,
    pipe_optimizer: Callable[[Pipeline], Any] | None = None,
    **options: Any,
) -> Outcome:
    """As `world.run_pipeline`; only the owners of the first and the last stage are given a batch."""
    copies = [copy.deepcopy(model) for _ in range(pp * dp)]

    def rank(transport: Any) -> Found:
        mesh = Mesh.local(pp=pp, dp=dp)
        pipe = Pipeline(copies[transport.rank], loss_fn, mesh, **{"vocabulary": "spread", **options})
        if before is not None:
            before(pipe)
        optim = optimizer(pipe.parameters()) if optimizer else None
        optim = pipe_optimizer(pipe) if pipe_optimizer else optim
        outcome, owners = Outcome(), {pipe.proof.target.placement.owners[end] for end in (0, -1)}
        for number, step in enumerate(steps):
            if optim and number:
                optim.zero_grad()
            outcome.results.append(pipe.step(step[mesh.dp_rank] if mesh.pp_rank in owners else None))
            outcome.norms.append(pipe.grad_norm())
            if optim:
                optim.step()
        outcome.gradients = {name: p.grad for name, p in pipe.named_parameters()}
        outcome.weights = {name: p.detach() for name, p in pipe.named_parameters()}
        shards = {name: shard for name, p in pipe.named_parameters() if (shard := shard_of(p)) is not None}
        return outcome, mesh.pp_rank, mesh.dp_rank, shards

    return joined(run_ranks(pp * dp, rank, **(transport or {})))


def joined(found: list[Found]) -> Outcome:
    """One outcome; replicas must be equal bitwise, every parameter but the spread ones must be on one rank."""
    first, shards = found[0][0], found[0][3]
    whole = Outcome(first.results, norms=first.norms)
    by_place = {(dp, pp): outcome for outcome, pp, dp, _ in found}
    for (dp, pp), outcome in sorted(by_place.items()):
        assert outcome.results == first.results
        assert outcome.norms == first.norms
        for kind in ("gradients", "weights"):
            mine, zero = getattr(outcome, kind), getattr(by_place[0, pp], kind)
            assert mine.keys() == zero.keys()
            for name, tensor in mine.items():
                assert tensor is zero[name] or torch.equal(tensor, zero[name]), f"replicas differ in {name}"
                if dp == 0 and name not in shards:
                    assert name not in getattr(whole, kind), f"{name} is on two ranks"
                    getattr(whole, kind)[name] = tensor
    for kind in ("gradients", "weights"):
        for name, shard in shards.items():
            parts = [getattr(by_place[0, pp], kind)[name] for pp in range(shard.parts)]
            getattr(whole, kind)[name] = None if parts[0] is None else to_full(parts, shard)
            for index, part in enumerate(parts):
                assert part is None or not part[shard.at(index).filled :].any(), f"padding of {name} is not zero"
    return whole
