"""Part of ``schedules.py``: blocks that sleep, so that the makespan shows the schedule and not the cores."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from statistics import median

import torch
from _sleeping import WIDTH, SplitSleep, mean_difference
from _turns import take_turns
from torch import nn

import pipert
from pipert.engine.halves import run_halves
from pipert.scheduler.costs import Costs
from pipert.scheduler.program import Program
from pipert.scheduler.simulate import simulate
from pipert.scheduler.timeline import Timeline

#: Stages a rank, of two blocks or one.
SCHEDULES = {"1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2, "auto": 2}
#: Seconds of a block's F, of I and of W; the last block takes twice as long.
SECONDS = 0.02
MICROBATCHES = 12
#: Makespans that are predicted to be closer than this share are in any order.
CLOSE = 0.02


def run(mesh: pipert.Mesh, folder: Path, rounds: int) -> dict[str, float]:
    """The makespans over the simulated ones, and how many pairs of schedules change places."""
    torch.set_num_threads(1)
    batch = (torch.randn(MICROBATCHES, WIDTH), torch.zeros(MICROBATCHES, WIDTH))
    count = 2 * mesh.pp
    blocks = [SplitSleep(*[SECONDS * (1 + (number == count - 1))] * 3) for number in range(count)]
    usual, last = (_alone(mesh, block) for block in (blocks[0], blocks[-1]))
    times = [usual] * (count - 1) + [last]
    pipes: dict[str, pipert.Pipeline] = {}
    predicted: dict[str, float] = {}
    for name, chunks in SCHEDULES.items():
        cuts = [2 // chunks] * (mesh.pp * chunks)
        costs = _costs(times, cuts)
        options = {"auto": pipert.AutoOptions(costs=costs)} if name == "auto" else {}
        pipe = pipert.Pipeline(
            nn.Sequential(*blocks), mean_difference, mesh, name, MICROBATCHES, cuts=cuts, chunks=chunks, **options
        )  # fmt: skip
        program = pipe.proof.target
        assert isinstance(program, Program)
        pipes[name], predicted[name] = pipe, simulate(program, costs).makespan
    timelines: dict[str, list[Timeline]] = {name: [] for name in pipes}
    contestants: dict[str, Callable[[], object]] = {name: lambda p=pipe: p.step(batch) for name, pipe in pipes.items()}  # type: ignore[misc]
    take_turns(mesh, contestants, rounds, lambda name: timelines[name].append(pipes[name].timeline()))
    measured = {name: median(each.makespan for each in lines) for name, lines in timelines.items()}
    swapped = sum(
        (measured[a] - measured[b]) * (predicted[a] - predicted[b]) < 0
        for a, b in combinations(pipes, 2)
        if abs(predicted[a] / predicted[b] - 1) > CLOSE
    )
    figures = {}
    for name in pipes:
        figures[f"{mesh.pp} ranks, {name}, simulated makespan, s"] = predicted[name]
        figures[f"{mesh.pp} ranks, {name}, makespan over simulated"] = measured[name] / predicted[name]
    return figures | {"pairs of schedules in another order than predicted": swapped}


def _costs(times: list[tuple[float, float, float]], cuts: list[int]) -> Costs:
    """The stages' times from the blocks'; the first stage's backward is in one piece."""
    ends = [sum(cuts[: number + 1]) for number in range(len(cuts))]
    forward, inputs, weights = (
        [sum(block[kind] for block in times[end - size : end]) for end, size in zip(ends, cuts, strict=True)]
        for kind in range(3)
    )
    backward = [a + b for a, b in zip(inputs, weights, strict=True)]
    return Costs(forward, backward, [0.0, *inputs[1:]], [backward[0], *weights[1:]])


def _alone(mesh: pipert.Mesh, block: SplitSleep, runs: int = 10) -> tuple[float, float, float]:
    """What a block's F, I and W take without a pipeline around it: medians over runs and ranks, all at once."""
    seconds = []
    mesh.world.barrier()
    for _ in range(runs):
        value = torch.zeros(1, WIDTH, requires_grad=True) * 1
        seconds.append(run_halves(block, [value]))
    mine = [median(kind) for kind in zip(*seconds, strict=True)]
    block.weight.grad = None
    ranks = [json.loads(blob) for blob in mesh.world.exchange(json.dumps(mine).encode())]
    forward, inputs, weights = (median(kind) for kind in zip(*ranks, strict=True))
    return forward, inputs, weights
