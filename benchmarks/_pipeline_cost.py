"""Part of ``pipeline.py``: what an action costs in the runtime itself, with stages that do next to nothing."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from _sleeping import Identity, mean_difference
from _torch_pipeline import TorchPipeline, start_gloo
from _turns import take_turns
from torch import nn

import pipert

MICROBATCHES = 64
#: 256 numbers of 4 bytes: messages of 1 KiB.
WIDTH = 256


def run(mesh: pipert.Mesh, folder: Path, rounds: int) -> dict[str, float]:
    """Microseconds an action of a rank, messages included, less what autograd takes without any pipeline."""
    torch.set_num_threads(1)
    start_gloo(mesh, folder)
    batch = (torch.randn(MICROBATCHES, WIDTH), torch.zeros(MICROBATCHES, WIDTH))
    model = nn.Sequential(*(Identity() for _ in range(mesh.pp)))
    pipe = pipert.Pipeline(model, mean_difference, mesh, schedule="1f1b", microbatches=MICROBATCHES, cuts=[1] * mesh.pp)
    theirs = TorchPipeline(
        [(number, model[number]) for number in pipe.modules], mesh.pp, "1f1b", MICROBATCHES, mean_difference
    )
    contestants = {
        "pipert": lambda: pipe.step(batch),
        "torch": lambda: theirs.step(*batch),
        "autograd": lambda: _autograd(mesh, batch),
    }
    seconds = take_turns(mesh, contestants, rounds)
    dist.destroy_process_group()
    actions = 2 * MICROBATCHES
    micros = {name: value / actions * 1e6 for name, value in seconds.items()}
    return {
        "autograd alone, us an action": micros["autograd"],
        "pipert's own, us an action": micros["pipert"] - micros["autograd"],
        "torch's own, us an action": micros["torch"] - micros["autograd"],
    }


def _autograd(mesh: pipert.Mesh, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """One rank's forwards and backwards with nothing around them."""
    stage, last = Identity(), mesh.world.rank == mesh.world.size - 1
    for inputs, target in zip(*(tensor.split(1) for tensor in batch), strict=True):
        output = stage(inputs.detach().requires_grad_())
        (mean_difference(output, target) if last else output).backward(None if last else inputs)
