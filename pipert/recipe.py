"""From a configuration to what it describes: mesh, pipeline, optimizer, learning rate, and one update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from pipert.comm.mesh import Mesh
from pipert.comm.mpi_start import promised_local_rank
from pipert.config import Config
from pipert.engine.auto import AutoOptions
from pipert.engine.pipeline import Pipeline
from pipert.errors import ConfigError
from pipert.layers.parallelize import parallelize
from pipert.models.gpt import GPT
from pipert.models.loss import CausalLMLoss
from pipert.optim.adamw import ZeroAdamW
from pipert.optim.groups import decay_groups
from pipert.optim.learning_rate import LearningRate


def make_mesh(config: Config) -> Mesh:
    """The configured mesh, over all ranks of the MPI job. With RCCL the ranks of a machine get its GPUs in turn.

    Raises:
        MeshError: another number of ranks was started.
        TransportError: on every rank; there is no MPI, or one of the ranks has no RCCL, or no GPU for it.
    """
    parallel = config.parallel
    if parallel.tensors != "mpi" and torch.cuda.is_available():
        torch.cuda.set_device((promised_local_rank() or 0) % torch.cuda.device_count())
    return Mesh.from_mpi(
        pp=parallel.pp, dp=parallel.dp, tp=parallel.tp, deadline=config.run.deadline, tensors=parallel.tensors
    )


def check_mesh(config: Config, mesh: Mesh) -> None:
    """Refuse a mesh that is not the configured one.

    Raises:
        ConfigError: it is not, or cannot be used.
    """
    parallel = config.parallel
    for axis in ("pp", "dp", "tp"):
        if getattr(mesh, axis) != getattr(parallel, axis):
            raise ConfigError(
                f"parallel.{axis} is {getattr(parallel, axis)} but the mesh has {axis} {getattr(mesh, axis)}; make "
                "them equal"
            )
    name = str(mesh.world.semantics["name"])
    moves = {"rccl-pair": "rccl", "rccl-direction": "rccl-direction"}.get(name, "mpi")
    if moves != parallel.tensors:
        raise ConfigError(
            f"parallel.tensors is {parallel.tensors} but the mesh moves them over {name}; make it with "
            f'tensors="{parallel.tensors}", as pipert.recipe.make_mesh does'
        )


def make_pipeline(config: Config, mesh: Mesh, example: object = None, *, dtype: torch.dtype | None = None) -> Pipeline:
    """The configured GPT in its pipeline. Every rank makes the same call.

    Args:
        config: the configuration.
        mesh: the ranks, laid out as the configuration says.
        example: inputs of one micro-batch, to measure the blocks with.
        dtype: of the parameters, instead of the configured one.

    Raises:
        ConfigError: as `check_mesh`.
    """
    check_mesh(config, mesh)
    parallel = config.parallel
    model = GPT(config.model, seed=config.run.seed)
    return Pipeline(
        parallelize(model, mesh, sequence_parallel=parallel.sequence_parallel),
        CausalLMLoss(),
        mesh,
        schedule=parallel.schedule,
        microbatches=config.microbatches,
        chunks=parallel.chunks,
        example=example,
        recompute=parallel.recompute,
        offload=parallel.offload,
        vocabulary=parallel.vocabulary,
        auto=AutoOptions(in_flight=parallel.in_flight) if parallel.schedule == "auto" else None,
        seed=config.run.seed,
        device=mesh.device,
        dtype=dtype,
        precision=config.run.precision if dtype is None else None,
    )


class HasParameters(Protocol):
    """A pipeline, or a model in one process."""

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Parameters with their names in the model."""
        ...


def make_optimizer(config: Config, model: HasParameters) -> torch.optim.Optimizer:
    """The configured optimizer over the parameters of a pipeline's rank, or of a model.

    It is torch's AdamW where that can do what is configured, else pipert's own.
    """
    settings = config.optimizer
    groups = decay_groups(model.named_parameters(), settings.weight_decay)
    options: dict[str, Any] = {"lr": settings.lr, "betas": (settings.beta1, settings.beta2), "eps": settings.eps}
    half = config.run.precision in ("bf16", "fp16")  # needs masters in fp32
    if isinstance(model, Pipeline) and (half or settings.early or config.parallel.zero):
        return ZeroAdamW(model, groups, **options, zero=config.parallel.zero, early=settings.early)
    return torch.optim.AdamW(groups, **options)


def make_learning_rate(config: Config) -> LearningRate:
    """The configured learning rate."""
    settings = config.schedule
    return LearningRate(
        config.optimizer.lr, settings.shape, settings.warmup, settings.length or config.run.steps, settings.final
    )


class Updater:
    """Turns the gradients of a step into an update of the weights, or skips it; the same decision on every rank.

    Args:
        config: the configuration.
        pipe: has the gradients.
        optimizer: has the weights.

    Attributes:
        updates: how often the weights have changed; the learning rate is a function of it.
        rate: the learning rate of the next update.
        norm: of the last step's gradients, before clipping.
    """

    def __init__(self, config: Config, pipe: Pipeline, optimizer: torch.optim.Optimizer) -> None:
        self._clip, self._pipe, self._optimizer = config.optimizer.clip, pipe, optimizer
        self._learning_rate = make_learning_rate(config)
        self.updates = 0
        self.norm = 0.0

    @property
    def rate(self) -> float:
        """See the class."""
        return self._learning_rate(self.updates)

    def update(self) -> bool:
        """Clip, step and clear the gradients; returns whether the weights changed. Every rank calls it."""
        for group in self._optimizer.param_groups:
            group["lr"] = self.rate
        decision = self._pipe.decide(self._clip or None)
        self.norm = decision.norm
        if decision.apply:
            self._optimizer.step()
            self.updates += 1
        self._optimizer.zero_grad()
        return decision.apply
