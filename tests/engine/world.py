"""Train a small model through a pipeline of threads, and the same model in one process with plain torch."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from pipert.comm.local import run_ranks
from pipert.comm.mesh import Mesh
from pipert.comm.transport import Transport
from pipert.engine.pipeline import Pipeline
from pipert.engine.result import StepResult
from pipert.gpt_config import GPTConfig
from pipert.models.gpt import GPT

Pairs = list[tuple[Any, Any]]
Optimizer = Callable[[Any], torch.optim.Optimizer]

SGD: Optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
ADAMW: Optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=0.01)  # noqa: E731

#: Every layout kind that has a schedule: name and chunks.
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)]


@dataclass
class Outcome:
    """What a run leaves, by the parameters' names."""

    results: list[StepResult] = field(default_factory=list)
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)


def run_pipeline(
    model: nn.Module,
    loss_fn: Any,
    steps: Sequence[Sequence[Any]],
    pp: int,
    dp: int = 1,
    *,
    optimizer: Optimizer | None = None,
    transport: dict[str, Any] | None = None,
    before: Callable[[Pipeline], None] | None = None,
    world: Callable[[Transport], Transport] = lambda transport: transport,
    **options: Any,
) -> Outcome:
    """Run steps on threads.

    Args:
        model: copied for every rank.
        loss_fn: as for Pipeline.
        steps: for each step the batch of each replica.
        pp: pipeline ranks.
        dp: replicas.
        optimizer: makes one on each rank; without one the gradients of all steps are added up.
        transport: options of run_ranks.
        before: called with each rank's pipeline before the first step.
        world: makes the mesh's world of run_ranks' transport.
        options: of Pipeline.
    """
    copies = [copy.deepcopy(model) for _ in range(pp * dp)]

    def rank(transport: Any) -> tuple[Outcome, int]:
        mesh = Mesh.from_transport(world(transport), pp=pp, dp=dp)
        pipe = Pipeline(copies[transport.rank], loss_fn, mesh, **options)
        if before is not None:
            before(pipe)
        optim = optimizer(pipe.parameters()) if optimizer else None
        outcome = Outcome()
        for number, step in enumerate(steps):
            if optim and number:
                optim.zero_grad()
            outcome.results.append(pipe.step(step[mesh.dp_rank]))
            outcome.norms.append(pipe.grad_norm())
            if optim:
                optim.step()
        outcome.gradients = {name: p.grad for name, p in pipe.named_parameters()}
        outcome.weights = {name: p.detach() for name, p in pipe.named_parameters()}
        return outcome, mesh.pp_rank

    return merge([outcome for outcome, _ in run_ranks(pp * dp, rank, **(transport or {}))])


def merge(outcomes: list[Outcome]) -> Outcome:
    """One outcome; results, and whatever several ranks hold, must be equal bitwise."""
    first = Outcome(outcomes[0].results, norms=outcomes[0].norms)
    for outcome in outcomes:
        assert outcome.results == first.results
        assert outcome.norms == first.norms
        for mine, theirs in ((first.gradients, outcome.gradients), (first.weights, outcome.weights)):
            for name, tensor in theirs.items():
                known = mine.setdefault(name, tensor)
                assert (known is None) == (tensor is None), name
                assert known is None or torch.equal(known, tensor), f"copies of {name} differ"
    return first


def run_plain(
    model: nn.Module,
    loss_fn: Any,
    steps: Sequence[Sequence[Pairs]],
    *,
    optimizer: Optimizer | None = None,
    count: Callable[[Any], float] | None = None,
) -> Outcome:
    """The same in one process, written without pipert: micro-batches one after another, each weighted by its count.

    Args:
        model: copied.
        loss_fn: a mean.
        steps: for each step, for each replica, its micro-batches.
        optimizer: as for run_pipeline.
        count: what a target counts; default its elements, or those that are not -100 if they are integers.
    """
    model = copy.deepcopy(model)
    optim = optimizer(model.parameters()) if optimizer else None
    outcome = Outcome()
    for number, replicas in enumerate(steps):
        if optim and number:
            optim.zero_grad()
        pairs = [pair for pairs in replicas for pair in pairs]
        counts = [(count or elements)(target) for _, target in pairs]
        loss = 0.0
        for (inputs, target), n in zip(pairs, counts, strict=True):
            if n:
                mean = loss_fn(model(inputs), target)
                (mean * (n / sum(counts))).backward()
                loss += n / sum(counts) * float(mean.detach())
        if not sum(counts):  # nothing counts in the whole batch: its gradients are zero, not absent
            for p in model.parameters():
                p.grad = torch.zeros_like(p) if p.requires_grad and p.grad is None else p.grad
        rows = sum(len(first_tensor(inputs)) for inputs, _ in pairs)
        outcome.results.append(StepResult(loss, sum(counts), rows, len(pairs), number))
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        outcome.norms.append(float(torch.stack([g.double().norm() for g in grads]).norm()) if grads else 0.0)
        if optim:
            optim.step()
    outcome.gradients = {name: p.grad for name, p in model.named_parameters()}
    outcome.weights = {name: p.detach() for name, p in model.named_parameters()}
    return outcome


def elements(target: torch.Tensor) -> float:
    return target.numel() if target.is_floating_point() else int((target != -100).sum())


def first_tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    items = value.values() if isinstance(value, dict) else value
    return next(first_tensor(item) for item in items)


def assert_same(mine: Outcome, reference: Outcome, tolerance: float = 1e-10) -> None:
    """Every loss, count, norm, gradient and weight agrees; bitwise if the tolerance is 0."""
    assert len(mine.results) == len(reference.results)
    for got, wanted in zip(mine.results, reference.results, strict=True):
        assert (got.tokens, got.samples, got.microbatches) == (wanted.tokens, wanted.samples, wanted.microbatches)
        assert abs(got.loss - wanted.loss) <= tolerance * max(1.0, abs(wanted.loss)), (got, wanted)
    for norm, wanted_norm in zip(mine.norms, reference.norms, strict=bool(mine.norms and reference.norms)):
        assert abs(norm - wanted_norm) <= max(tolerance, 1e-12) * max(1.0, wanted_norm)
    for kind in ("gradients", "weights"):
        got_all, wanted_all = getattr(mine, kind), getattr(reference, kind)
        assert set(got_all) == set(wanted_all)
        for name, wanted_tensor in wanted_all.items():
            tensor = got_all[name]
            assert (tensor is None) == (wanted_tensor is None), f"{kind} of {name}: {tensor} / {wanted_tensor}"
            if tensor is not None:
                close(tensor, wanted_tensor, tolerance, f"{kind} of {name}")


def close(tensor: torch.Tensor, wanted: torch.Tensor, tolerance: float, what: str) -> None:
    if tolerance == 0:
        assert torch.equal(tensor, wanted), f"{what} differ by {(tensor - wanted).abs().max()}"
    else:
        torch.testing.assert_close(tensor, wanted, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


# ---- models and data
# ----------------------------------------------------------------------------------------------------


_SEEDED = threading.RLock()  # builders of models call each other


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from torch's global generator, seeded; it is as before afterwards. Ranks that are threads take turns."""
    with _SEEDED, torch.random.fork_rng([]):
        torch.manual_seed(seed)
        yield


def tower(blocks: int, width: int = 6, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Sequential:
    """Blocks in a row, of different kinds."""
    with seeded(seed):
        kinds = [
            lambda: nn.Sequential(nn.Linear(width, width), nn.Tanh()),
            lambda: Residual(width),
            lambda: nn.LayerNorm(width),
            lambda: nn.Linear(width, width, bias=False),
        ]
        return nn.Sequential(*(kinds[i % len(kinds)]() for i in range(blocks))).to(dtype)


def tie_and_freeze(model: nn.Sequential, tied: Collection[int], frozen: Collection[int]) -> None:
    """Give some linear layers of a tower one weight, and freeze some blocks unless nothing were left to train."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for index in tied:
        linears[index % len(linears)].weight = linears[min(tied) % len(linears)].weight
    for index, block in enumerate(model):
        block.requires_grad_(index not in frozen)
    if all(not p.requires_grad for p in model.parameters()):
        model.requires_grad_(True)


class Bomb(nn.Module):
    """A linear layer that does something else in its fourth forward first."""

    def __init__(self, width: int, act: Callable[[], object]) -> None:
        super().__init__()
        self.linear, self.count, self.act = nn.Linear(width, width), 0, act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if self.count == 4:
            self.act()
        return self.linear(x)


class Residual(nn.Module):
    """``x + linear(x)``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


def gpt(dtype: torch.dtype = torch.float64, **changes: Any) -> GPT:
    """The reference model of the cases: 8 blocks, hidden 32, 4 heads, sequence 16, vocabulary 61."""
    shape: dict[str, Any] = {"layers": 8, "hidden": 32, "heads": 4, "sequence": 16, "vocabulary": 61, "dropout": 0.0}
    return GPT(GPTConfig(**{**shape, **changes}), device="cpu", seed=3, dtype=dtype)


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def tokens(samples: int, length: int = 16, seed: int = 0, vocabulary: int = 61) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and next ids."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, (samples, length + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def vectors(samples: int, width: int = 6, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs and targets in float64."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(samples, width, generator=generator, dtype=torch.float64),
        torch.randn(samples, width, generator=generator, dtype=torch.float64),
    )


def parts(batch: tuple[torch.Tensor, torch.Tensor], count: int) -> Pairs:
    """A batch as micro-batches."""
    count = min(count, len(batch[0]))
    return list(zip(batch[0].tensor_split(count), batch[1].tensor_split(count), strict=True))
