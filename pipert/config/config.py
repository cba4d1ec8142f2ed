"""A whole configuration, and the rules between its keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pipert.config.sections import DataConfig, OptimizerConfig, ParallelConfig, RunConfig, ScheduleConfig
from pipert.errors import ConfigError
from pipert.gpt_config import GPTConfig
from pipert.scheduler.errors import ScheduleError
from pipert.scheduler.generators.registry import generate


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that a training run is told.

    Raises:
        ConfigError: keys do not fit each other; the message shows the sum that does not come out.
    """

    model: GPTConfig
    data: DataConfig
    run: RunConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        problems = [*self._layout(), *self._batch(), *self._lengths()]
        if problems:
            raise ConfigError("\n".join(problems))

    @property
    def microbatches(self) -> int:
        """Micro-batches of a replica in a step."""
        return self.data.global_batch // (self.parallel.dp * self.parallel.micro_batch)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step, over all replicas."""
        return self.data.global_batch * self.model.sequence

    def _layout(self) -> Iterator[str]:
        pp, tp, chunks, layers = self.parallel.pp, self.parallel.tp, self.parallel.chunks, self.model.layers
        if pp * chunks > layers:
            remedy = f"chunks <= {layers // pp}" if layers >= pp else f"pp <= {layers}"
            yield (
                f"parallel.pp {pp} × parallel.chunks {chunks} = {pp * chunks} stages for model.layers {layers}; "
                f"every stage needs a layer, so use {remedy}"
            )
        else:
            try:
                # A searched one puts as many on a rank as it is told, or finds out itself how many there may be.
                auto = self.parallel.schedule == "auto"
                stages = pp * chunks if auto else generate(self.parallel.schedule, pp, 1, chunks).num_stages
            except ScheduleError as error:
                yield f"parallel.schedule: {error}"
            else:
                if stages > layers:  # a schedule may have more stages a rank of its own
                    yield (
                        f"parallel.schedule {self.parallel.schedule} with parallel.pp {pp} has {stages} stages for "
                        f"model.layers {layers}; every stage needs a layer, so use pp <= {layers * pp // stages} or "
                        "another schedule"
                    )
        if self.parallel.in_flight is not None and self.parallel.schedule != "auto":
            yield (
                f"parallel.in_flight {self.parallel.in_flight} limits a searched schedule, but parallel.schedule is "
                f'{self.parallel.schedule}; leave it out, or use schedule = "auto"'
            )
        if self.parallel.vocabulary == "spread" and tp > 1:
            yield f'parallel.vocabulary "spread" with parallel.tp {tp}: rows are shared out already; use one of the two'
        if self.parallel.vocabulary == "spread" and self.parallel.zero >= 2:
            yield (
                f'parallel.vocabulary "spread" with parallel.zero {self.parallel.zero}: its gradients and weights '
                'are not shared out among replicas; use zero = 1, or vocabulary = "ends"'
            )
        for problem in self.model.tensor_parallel_problems(tp, sequence_parallel=self.parallel.sequence_parallel):
            yield f"model with parallel.tp {tp}: {problem}"

    def _batch(self) -> Iterator[str]:
        dp, size, batch = self.parallel.dp, self.parallel.micro_batch, self.data.global_batch
        if batch % (dp * size):
            fits = sorted({batch // (dp * size) * dp * size or dp * size, (batch // (dp * size) + 1) * dp * size})
            yield (
                f"data.global_batch {batch} / (parallel.dp {dp} × parallel.micro_batch {size}) = "
                f"{batch / (dp * size):.4g} micro-batches, not a whole number; use global_batch "
                f"{' or '.join(map(str, fits))}"
            )

    def _lengths(self) -> Iterator[str]:
        if self.schedule.warmup > self.run.steps:
            yield (
                f"schedule.warmup {self.schedule.warmup} is longer than run.steps {self.run.steps}; "
                f"the learning rate would never reach its peak, so use schedule.warmup <= {self.run.steps}"
            )
        if self.schedule.length is not None and self.schedule.length <= self.schedule.warmup:
            yield (
                f"schedule.length {self.schedule.length} ends within schedule.warmup {self.schedule.warmup}; "
                f"use a length above {self.schedule.warmup}, or leave it out"
            )
        if self.data.tokenizer == "bytes" and self.model.vocabulary < 256:
            yield f"model.vocabulary {self.model.vocabulary} is too small for data.tokenizer bytes; use 256"
