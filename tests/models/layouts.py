"""Train a GPT in any layout of threads, with whole gradients and weights put together, and in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pipert.comm.local import run_ranks
from pipert.comm.mesh import Mesh
from pipert.engine.pipeline import Pipeline
from pipert.engine.reference import reference_step
from pipert.layers.parallelize import parallelize
from pipert.layers.shard import shard_of, to_full
from pipert.models import GPT, CausalLMLoss, GPTConfig

Batch = tuple[torch.Tensor, torch.Tensor]
Tensors = dict[str, torch.Tensor]
Optimizer = Callable[[Any], torch.optim.Optimizer]
SEED = 7


@dataclass
class Trained:
    """What some steps leave, by the parameters' names.

    Attributes:
        losses, norms: of each step.
        gradients: of the last step.
        initial, weights: before the first step, and after the last one.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: Tensors = field(default_factory=dict)
    initial: Tensors = field(default_factory=dict)
    weights: Tensors = field(default_factory=dict)


def batches(config: GPTConfig, steps: int, samples: int, ignored: float = 0.0) -> list[Batch]:
    """Random tokens, some targets of which do not count."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(steps):
        ids = torch.randint(config.vocabulary, (samples, config.sequence + 1), generator=generator)
        targets = ids[:, 1:].clone()
        targets[torch.rand(targets.shape, generator=generator) < ignored] = -100
        made.append((ids[:, :-1], targets))
    return made


def alone(
    config: GPTConfig,
    steps: Sequence[Batch],
    microbatches: int,
    *,
    loss_fn: Any = None,
    optimizer: Optimizer | None = None,
    dtype: torch.dtype = torch.float64,
) -> Trained:
    """In one process."""
    model = GPT(config, "cpu", seed=SEED, dtype=dtype)
    optim = optimizer(model.parameters()) if optimizer else None
    out = Trained(initial=_whole(model.named_parameters()))
    for number, batch in enumerate(steps):
        model.zero_grad()
        out.losses.append(
            reference_step(model, loss_fn or CausalLMLoss(), batch, microbatches, seed=SEED, step=number).loss
        )
        out.norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))  # type: ignore[misc]
        if optim:
            optim.step()
    out.gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    out.weights = _whole(model.named_parameters())
    return out


def on_ranks(
    config: GPTConfig,
    steps: Sequence[Batch],
    microbatches: int,
    *,
    pp: int = 1,
    dp: int = 1,
    tp: int = 1,
    sequence_parallel: bool = False,
    overlap: bool = True,
    loss_fn: Any = None,
    optimizer: Optimizer | None = None,
    dtype: torch.dtype = torch.float64,
    real: bool = False,
    **options: Any,
) -> Trained:
    """On threads. Whatever several ranks hold must be equal bitwise."""

    def rank(_: object) -> tuple[list[float], list[float], list[dict[str, Any]]]:
        mesh = Mesh.local(pp=pp, dp=dp, tp=tp)
        model: torch.nn.Module = GPT(config, "cpu" if real else "meta", seed=SEED, dtype=dtype)
        if sequence_parallel or not overlap:
            model = parallelize(model, mesh, sequence_parallel=sequence_parallel, overlap=overlap)
        pipe = Pipeline(model, loss_fn or CausalLMLoss(), mesh, microbatches=microbatches // dp, seed=SEED, **options)
        optim = optimizer(pipe.parameters()) if optimizer else None
        initial = _parts(pipe, lambda p: p.detach().clone())
        losses, norms = [], []
        for inputs, targets in steps:
            for parameter in pipe.parameters():
                parameter.grad = None
            share = slice(mesh.dp_rank * len(inputs) // dp, (mesh.dp_rank + 1) * len(inputs) // dp)
            losses.append(pipe.step((inputs[share], targets[share])).loss)
            norms.append(pipe.grad_norm())
            if optim:
                optim.step()
        return losses, norms, [initial, _parts(pipe, lambda p: p.grad), _parts(pipe, lambda p: p.detach())]

    outcomes = run_ranks(pp * dp * tp, rank, deadline=60)
    losses, norms, _ = outcomes[0]
    for other_losses, other_norms, _ in outcomes:
        assert other_losses == losses
        assert other_norms == norms
    initial, gradients, weights = (merged([tensors[kind] for _, _, tensors in outcomes], tp) for kind in range(3))
    return Trained(losses, norms, gradients, initial, weights)


def _parts(pipe: Pipeline, of: Callable[[torch.nn.Parameter], torch.Tensor | None]) -> dict[str, Any]:
    return {name: (of(p), shard_of(p)) for name, p in pipe.named_parameters()}


def merged(ranks: Sequence[dict[str, Any]], tp: int) -> Tensors:
    """Whole tensors from every rank's parts; copies must be equal bitwise, also those within sharded ones."""
    found: dict[str, dict[int, Any]] = {}
    whole: Tensors = {}
    for parts in ranks:
        for name, (tensor, shard) in parts.items():
            if tensor is None:
                continue
            known = found.setdefault(name, {}).setdefault(0 if shard is None else shard.index, (tensor, shard))
            assert torch.equal(known[0], tensor), f"copies of {name} differ"
    for name, by_index in found.items():
        tensor, shard = by_index[0]
        if shard is None:
            whole[name] = tensor
            continue
        assert sorted(by_index) == list(range(tp))
        tensors = [by_index[index][0] for index in range(tp)]
        whole[name] = to_full(tensors, shard)
        for index, part in enumerate(tensors):
            assert torch.equal(shard.at(index).take(whole[name]), part), f"copies of rows of {name} differ"
    return whole


def _whole(named: Any) -> Tensors:
    return {name: p.detach().clone() for name, p in named}


def assert_agree(mine: Trained, wanted: Trained, tolerance: float = 1e-10) -> None:
    """Losses, norms, every gradient and weight."""
    assert mine.losses == [_near(loss, tolerance) for loss in wanted.losses]
    assert mine.norms == [_near(norm, tolerance) for norm in wanted.norms]
    for kind in ("initial", "gradients", "weights"):
        got, expected = getattr(mine, kind), getattr(wanted, kind)
        assert got.keys() == expected.keys()
        for name, tensor in expected.items():
            limit = 0.0 if kind == "initial" else tolerance
            torch.testing.assert_close(
                got[name],
                tensor,
                rtol=limit,
                atol=limit,
                msg=lambda text: f"{kind} of {name}: {text}",  # noqa: B023
            )


def _near(value: float, tolerance: float) -> Any:
    import pytest

    return pytest.approx(value, rel=tolerance)
