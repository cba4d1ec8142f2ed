"""Does a configuration train to the numbers of one process? A few steps in its layout and in one process, compared.

It is how a user finds out on a cluster of their own that a layout changes nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import torch

from pipert.comm.mesh import Mesh
from pipert.config import Config
from pipert.data.loader import Loader
from pipert.data.windows import TokenWindows
from pipert.engine.collect import Collected, collect
from pipert.engine.norm import squared_norms
from pipert.engine.pipeline import Pipeline
from pipert.engine.reference import reference_step
from pipert.errors import ConfigError
from pipert.layers.shard import gather_full, shard_of
from pipert.models.gpt import GPT
from pipert.models.loss import CausalLMLoss
from pipert.optim.zero import ZeroOptimizer
from pipert.recipe import Updater, make_learning_rate, make_optimizer, make_pipeline
from pipert.trainer import open_text

#: By dtype the largest relative difference that rounding explains. In float32 it is large, because AdamW divides
#: gradients that are rounding errors by their own size.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class Difference:
    """The largest difference of one kind of number in one step.

    Attributes:
        step: which step.
        what: ``loss``, ``norm``, ``gradient`` or ``weight``.
        where: the parameter that differs most; empty for loss and norm.
        absolute: the largest difference of an element.
        relative: the same over the largest element of that parameter in one process.
    """

    step: int
    what: str
    where: str
    absolute: float
    relative: float


@dataclass(frozen=True)
class Comparison:
    """A layout against one process.

    Attributes:
        layout: what was run, in words.
        tolerance: the largest relative difference that is taken for rounding.
        differences: four for every step: loss, norm, gradient, weight.
    """

    layout: str
    tolerance: float
    differences: tuple[Difference, ...]

    @property
    def worst(self) -> Difference:
        """The largest relative difference."""
        return max(self.differences, key=lambda difference: _order(difference.relative))

    @property
    def ok(self) -> bool:
        """Whether all differences are rounding."""
        return self.worst.relative <= self.tolerance  # false for NaN

    def to_json(self) -> str:
        """One line."""
        return json.dumps({**asdict(self), "ok": self.ok})


def verify_run(config: Config, mesh: Mesh, steps: int = 3, dtype: torch.dtype | None = None) -> Comparison:
    """Train as configured for some steps, on the mesh and in one process (rank 0), and compare.

    Every rank makes the same call. Rank 0 needs memory for the whole model, its gradients and moments.

    Args:
        config: the configuration.
        mesh: the ranks, laid out as the configuration says.
        steps: how many.
        dtype: of the parameters, instead of the configured one; float64 tells faults from rounding best.

    Returns:
        the largest differences, the same on every rank.

    Raises:
        ConfigError: the configuration cannot be run, or ``steps`` is no positive number.
    """
    if steps < 1:
        raise ConfigError(f"steps = {steps} must be at least 1")
    if dtype is None and config.run.precision in ("bf16", "fp16"):
        raise ConfigError(
            f"run.precision = {config.run.precision} rounds more than layouts may differ; compare in float64 "
            "(--dtype float64)"
        )
    text = open_text(config, mesh)
    windows = TokenWindows(text.train, config.model.sequence)
    layout = _Layout(config, mesh, windows, dtype)
    process = _OneProcess(config, windows, layout.dtype) if mesh.rank == 0 else None
    found: list[Difference] = []
    for step in range(steps):
        loss, norm = layout.step()
        expected = process.step(step) if process else None
        gradients = _worst(layout.gradients(), process.gradients() if process else {})
        layout.update()
        if process:
            process.update()
        weights = _worst(layout.weights(), process.weights() if process else {})
        if expected:
            pairs = (("loss", loss, expected[0]), ("norm", norm, expected[1]))
            numbers = [Difference(step, what, "", abs(a - b), abs(a - b) / abs(b or 1.0)) for what, a, b in pairs]
            found += [*numbers, Difference(step, "gradient", *gradients), Difference(step, "weight", *weights)]
    blob = json.dumps([asdict(difference) for difference in found]).encode()
    told = json.loads(mesh.world.exchange(blob)[0])
    return Comparison(str(config.parallel), TOLERANCES[layout.dtype], tuple(Difference(**entry) for entry in told))


class _Layout:
    """The run in its layout."""

    def __init__(self, config: Config, mesh: Mesh, windows: TokenWindows, dtype: torch.dtype | None) -> None:
        self._mesh = mesh
        self._loader = _loader(config, windows, mesh.dp_rank, mesh.dp)
        self.pipe: Pipeline = make_pipeline(config, mesh, dtype=dtype)
        self._optimizer = make_optimizer(config, self.pipe)
        self._updater = Updater(config, self.pipe, self._optimizer)
        self._shares = mesh.pp_group if config.parallel.vocabulary == "spread" else mesh.tp_group
        self.dtype = next(self.pipe.parameters()).dtype

    def step(self) -> tuple[float, float]:
        """Loss and norm of the gradients."""
        result = self.pipe.step(next(self._loader))
        return result.loss, self.pipe.grad_norm()

    def update(self) -> None:
        self._updater.update()

    def gradients(self) -> Collected:
        """Every rank's gradients, on rank 0."""
        if isinstance(self._optimizer, ZeroOptimizer):
            return self._collect(self._optimizer.gradients())
        return self._collect({name: parameter.grad for name, parameter in self.pipe.named_parameters()})

    def weights(self) -> Collected:
        """Every rank's weights, on rank 0."""
        with self._optimizer.gathered() if isinstance(self._optimizer, ZeroOptimizer) else nullcontext():
            return self._collect(dict(self.pipe.named_parameters()))

    def _collect(self, tensors: Mapping[str, torch.Tensor | None]) -> Collected:
        """Whole tensors, where ranks have parts of them."""
        whole = {}
        for name, parameter in self.pipe.named_parameters():
            tensor, shard = tensors[name], shard_of(parameter)
            if tensor is not None:
                whole[name] = tensor if shard is None else gather_full(tensor, shard, self._shares)
        return collect(whole, self._mesh.world)


class _OneProcess:
    """The same run in one process, with plain autograd."""

    def __init__(self, config: Config, windows: TokenWindows, dtype: torch.dtype) -> None:
        self._config = config
        self._loaders = [_loader(config, windows, r, config.parallel.dp) for r in range(config.parallel.dp)]
        self._model = GPT(config.model, device="cpu", seed=config.run.seed, dtype=dtype)
        self._optimizer = make_optimizer(config, self._model)
        self._learning_rate, self._updates, self._norm = make_learning_rate(config), 0, 0.0

    def step(self, step: int) -> tuple[float, float]:
        """Loss and norm of the gradients."""
        first, *others = [next(loader) for loader in self._loaders]
        config = self._config
        result = reference_step(
            self._model, CausalLMLoss(), first, config.microbatches, replicas=others, seed=config.run.seed, step=step
        )
        self._norm = math.sqrt(sum(squared_norms(p for p in self._model.parameters() if p.grad is not None)))
        return result.loss, self._norm

    def update(self) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate(self._updates)
        if self._config.optimizer.clip:
            torch.nn.utils.clip_grads_with_norm_(
                self._model.parameters(), self._config.optimizer.clip, torch.tensor(self._norm, dtype=torch.float64)
            )
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._updates += 1

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad for name, p in self._model.named_parameters() if p.grad is not None}

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in self._model.named_parameters()}


def _loader(config: Config, windows: TokenWindows, replica: int, replicas: int) -> Loader:
    return Loader(windows, config.data.global_batch, seed=config.run.seed, replica=replica, replicas=replicas)


def _worst(collected: Collected, expected: Mapping[str, torch.Tensor]) -> tuple[str, float, float]:
    """The parameter that differs most, and by how much, among all copies of all parameters."""
    worst = ("", 0.0, 0.0)
    for name, right in expected.items():
        scale = float(right.double().abs().max()) if right.numel() else 0.0
        for tensor in collected.get(name, {-1: torch.full_like(right, math.nan)}).values():
            absolute = float((tensor.double() - right.double()).abs().max()) if right.numel() else 0.0
            relative = absolute / scale if scale else absolute
            if _order(relative) > _order(worst[2]):
                worst = (name, absolute, relative)
    for name in collected.keys() - expected.keys():
        worst = (name, math.nan, math.nan)
    return worst


def _order(relative: float) -> float:
    """NaN is the largest difference of all."""
    return math.inf if math.isnan(relative) else relative
