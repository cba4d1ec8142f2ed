"""The contestant: torch.distributed.pipelining on gloo, inside ranks that were started for MPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "interleaved-zb": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
}


def start_gloo(mesh: Any, folder: Path) -> None:
    """Join a gloo group of the mesh's ranks that meets in a file."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/gloo", rank=mesh.world.rank, world_size=mesh.world.size
    )


class TorchPipeline:
    """One training step after the other through torch's own schedule.

    Args:
        stages: this rank's stage modules with their numbers, in model order.
        num_stages: stages over all ranks.
        schedule: one of `SCHEDULES`.
        microbatches: micro-batches of a step.
        loss_fn: mean loss of (output, target).
    """

    def __init__(
        self,
        stages: Sequence[tuple[int, nn.Module]],
        num_stages: int,
        schedule: str,
        microbatches: int,
        loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        device = torch.device("cpu")
        built = [PipelineStage(module, number, num_stages, device) for number, module in stages]
        make = getattr(torch_schedules, SCHEDULES[schedule])
        multi = issubclass(make, torch_schedules.PipelineScheduleMulti)
        self._schedule = make(built if multi else built[0], microbatches, loss_fn=loss_fn)
        self._first = any(number == 0 for number, _ in stages)
        self._last = any(number == num_stages - 1 for number, _ in stages)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float | None:
        """Forward and backward of one batch; the mean loss where it is known."""
        losses: list[torch.Tensor] = []
        self._schedule.step(
            *((inputs,) if self._first else ()),
            **({"target": targets, "losses": losses} if self._last else {}),
        )
        return sum(loss.item() for loss in losses) / len(losses) if losses else None
