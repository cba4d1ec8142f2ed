"""PyTorch's own pipeline schedules, without processes: what every rank would run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.pipelining import schedules as pipelining
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

#: Its schedules of several stages a rank: class, stages a rank, placement.
CLASSES: dict[str, tuple[type[Any], int, str]] = {
    "LoopedBFS": (pipelining.ScheduleLoopedBFS, 2, "loop"),
    "Interleaved1F1B": (pipelining.ScheduleInterleaved1F1B, 2, "loop"),
    "InterleavedZeroBubble": (pipelining.ScheduleInterleavedZeroBubble, 2, "loop"),
    "ZBVZeroBubble": (pipelining.ScheduleZBVZeroBubble, 2, "v"),
    "DualPipeV": (pipelining.ScheduleDualPipeV, 2, "v"),
}


def make(name: str, ranks: int, microbatches: int, *, defer: bool = False) -> Any:
    """The torch schedule of that name."""
    cls, chunks, style = CLASSES[name]
    owners = generate_stage_to_rank_mapping(ranks, ranks * chunks, style=style)
    stages = [
        # As much of a stage as a schedule looks at.
        SimpleNamespace(
            num_stages=ranks * chunks, stage_index=index, group_size=ranks, group_rank=0, submod=torch.nn.Identity()
        )
        for index, owner in owners.items()
        if owner == 0
    ]
    return cls(stages, microbatches, loss_fn=None, defer_pp_recv=defer)


def as_csv(order: dict[int, list[Any]]) -> str:
    """As torch's ``_dump_csv`` writes it."""
    rows = (",".join("" if action is None else str(action) for action in order[rank]) for rank in sorted(order))
    return "\n".join(rows) + "\n"
