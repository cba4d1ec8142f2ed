"""The contestants: torch DDP and FSDP2 on gloo, inside ranks that were started for MPI."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from pipert.gpt_config import GPTConfig
from pipert.models import GPT

Batch = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class TorchRun:
    """A replica of a GPT under torch's data parallelism; each call of `step` trains on this rank's batch.

    Args:
        config: the model.
        kind: ``ddp``, ``ddp-zero1`` (DDP with ZeroRedundancyOptimizer), ``fsdp2`` (parameters stay gathered until the
            backward) or ``fsdp3`` (gathered again for it).
        loss_fn: mean loss of (output, target).
        microbatches: into how many a batch is split; gradients travel with the last one where torch allows it.
        rate: AdamW's learning rate.
    """

    def __init__(self, config: GPTConfig, kind: str, loss_fn: Loss, microbatches: int, rate: float) -> None:
        model = GPT(config, device="cpu")
        self._sharded = kind.startswith("fsdp")
        self._model: nn.Module
        if self._sharded:
            mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
            for block in model.get_submodule("blocks").children():
                fully_shard(block, mesh=mesh, reshard_after_forward=kind == "fsdp3")
            self._model = fully_shard(model, mesh=mesh, reshard_after_forward=kind == "fsdp3")
        else:
            self._model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        parameters = list(self._model.parameters())
        self._optimizer: torch.optim.Optimizer
        if kind == "ddp-zero1":
            self._optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=rate, foreach=True)
        else:
            self._optimizer = torch.optim.AdamW(parameters, lr=rate, foreach=True)
        self._loss_fn, self._microbatches = loss_fn, microbatches

    def step(self, batch: Batch) -> None:
        """Forward, backward and update."""
        parts = list(zip(batch[0].chunk(self._microbatches), batch[1].chunk(self._microbatches), strict=True))
        for number, (inputs, targets) in enumerate(parts):
            last = number == len(parts) - 1
            if isinstance(self._model, DistributedDataParallel):
                self._model.require_backward_grad_sync = last
            loss = self._loss_fn(self._model(inputs), targets) / len(parts)
            loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
