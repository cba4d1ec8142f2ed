"""Part of ``pipeline.py``: stages that sleep, so that the makespan shows the runtime and not the cores."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from _sleeping import SleepStage, mean_difference
from _torch_pipeline import TorchPipeline, start_gloo
from _turns import take_turns
from torch import nn

import pipert
from pipert.scheduler.costs import Costs
from pipert.scheduler.generators.registry import generate
from pipert.scheduler.simulate import simulate
from pipert.scheduler.timeline import Timeline

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2}
#: Seconds that a rank's stages sleep together, for one micro-batch.
FORWARD, BACKWARD = 0.04, 0.08
MICROBATCHES = 16


def run(mesh: pipert.Mesh, folder: Path, rounds: int) -> dict[str, float]:
    """How much longer the steps take than the simulator says.

    It is told what a stage takes by itself, in plain autograd on all ranks at once: a sleep on a shared machine ends
    late, and the code around it runs with cold caches. Beside that stands the ratio for sleeps of nominal length.
    """
    torch.set_num_threads(1)
    start_gloo(mesh, folder)
    batch = (torch.randn(MICROBATCHES, 256), torch.zeros(MICROBATCHES, 256))
    pipes: dict[str, pipert.Pipeline] = {}
    contestants: dict[str, Callable[[], object]] = {}
    costs: dict[str, Costs] = {}
    for name, chunks in SCHEDULES.items():
        stages = mesh.pp * chunks
        model = nn.Sequential(*(SleepStage(FORWARD / chunks, BACKWARD / chunks) for _ in range(stages)))
        pipe = pipert.Pipeline(
            model, mean_difference, mesh, schedule=name, microbatches=MICROBATCHES, chunks=chunks, cuts=[1] * stages
        )
        costs[name] = _alone(mesh, SleepStage(FORWARD / chunks, BACKWARD / chunks), batch[0][:1])
        theirs = TorchPipeline(
            [(number, model[number]) for number in pipe.modules], stages, name, MICROBATCHES, mean_difference
        )
        pipes[f"pipert {name}"] = pipe
        contestants[f"pipert {name}"] = lambda pipe=pipe: pipe.step(batch)  # type: ignore[misc]
        contestants[f"torch {name}"] = lambda theirs=theirs: theirs.step(*batch)  # type: ignore[misc]
    timelines: dict[str, list[Timeline]] = {name: [] for name in pipes}
    seconds = take_turns(
        mesh, contestants, rounds, lambda name: name in pipes and timelines[name].append(pipes[name].timeline())
    )
    dist.destroy_process_group()
    figures = {}
    for name, chunks in SCHEDULES.items():
        schedule = generate(name, mesh.pp, MICROBATCHES, chunks)
        predicted = simulate(schedule, costs[name]).makespan
        nominal = simulate(schedule, Costs(forward=FORWARD / chunks, backward=BACKWARD / chunks)).makespan
        makespan = median(each.makespan for each in timelines[f"pipert {name}"])
        figures |= {
            f"{mesh.pp} ranks, {name}, makespan over simulated": makespan / predicted,
            f"{mesh.pp} ranks, {name}, makespan over nominal": makespan / nominal,
            f"{mesh.pp} ranks, {name}, step over nominal": seconds[f"pipert {name}"] / nominal,
            f"{mesh.pp} ranks, {name}, torch's step over nominal": seconds[f"torch {name}"] / nominal,
        }
    return figures


def _alone(mesh: pipert.Mesh, stage: SleepStage, inputs: torch.Tensor, runs: int = 12) -> Costs:
    """What a stage takes without a pipeline around it: the median over runs and ranks, all ranks at once."""
    forward, backward = [], []
    mesh.world.barrier()
    for _ in range(runs):
        start = time.perf_counter()
        output = stage(inputs.detach().requires_grad_())
        middle = time.perf_counter()
        output.backward(inputs)
        forward.append(middle - start)
        backward.append(time.perf_counter() - middle)
    ranks = [json.loads(blob) for blob in mesh.world.exchange(json.dumps([median(forward), median(backward)]).encode())]
    return Costs(forward=median(rank[0] for rank in ranks), backward=median(rank[1] for rank in ranks))
