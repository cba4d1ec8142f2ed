"""Part of ``schedules.py``: a GPT on 2 ranks, one thread each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from _torch_pipeline import TorchPipeline, start_gloo
from _turns import all_turns, ratio
from torch import nn

import pipert
from pipert.gpt_config import GPTConfig
from pipert.models import GPT
from pipert.models.loss import CausalLMLoss
from pipert.report.measured import measured_costs
from pipert.scheduler.program import Program
from pipert.scheduler.simulate import simulate
from pipert.scheduler.timeline import Timeline

#: 8 million parameters, and work for two equal ranks: the head is about as heavy as a block. Four micro-batches of 128
#: tokens: 1F1B's bubble is a fifth.
CONFIG = GPTConfig(layers=9, hidden=256, heads=4, sequence=128, vocabulary=2048, tied=False)
MICROBATCHES, SAMPLES = 4, 4
OURS = ("1f1b", "zb-h1", "zb-v", "auto")
#: torch's schedules and their stages a rank.
THEIRS = {"1f1b": 1, "interleaved": 2, "interleaved-zb": 2, "zb-v": 2}

Batch = tuple[torch.Tensor, torch.Tensor]


def run(mesh: pipert.Mesh, folder: Path, rounds: int) -> dict[str, float]:
    """What zero-bubble schedules gain over 1F1B, measured and predicted, and the best against torch's best."""
    torch.set_num_threads(1)
    start_gloo(mesh, folder)
    loss = CausalLMLoss()
    ids = torch.randint(CONFIG.vocabulary, (SAMPLES, CONFIG.sequence), generator=torch.Generator().manual_seed(0))
    batch = (ids, ids.roll(-1, 1))
    example = ids[: SAMPLES // MICROBATCHES]
    pipes = {
        name: pipert.Pipeline(GPT(CONFIG), loss, mesh, schedule=name, microbatches=MICROBATCHES, example=example)
        for name in OURS
    }
    for _ in range(2):
        _ours(pipes["auto"], batch)
    found = pipes["auto"].replan()
    contestants: dict[str, Callable[[], object]] = {}
    for name, pipe in pipes.items():
        contestants[f"pipert {name}"] = lambda pipe=pipe: _ours(pipe, batch)  # type: ignore[misc]
    for name, chunks in THEIRS.items():
        modules = _torch_stages(mesh, pipes, name, chunks)
        theirs = TorchPipeline(list(modules.items()), mesh.pp * chunks, name, MICROBATCHES, loss)
        contestants[f"torch {name}"] = lambda theirs=theirs, m=modules: _theirs(theirs, m, batch)  # type: ignore[misc]
    lines: dict[str, list[Timeline]] = {name: [] for name in pipes}

    def note(name: str) -> None:
        whose, _, schedule = name.partition(" ")
        if whose == "pipert":
            lines[schedule].append(pipes[schedule].timeline())

    seconds = all_turns(mesh, contestants, rounds, note)
    dist.destroy_process_group()
    predicted = {name: _predicted(pipe, lines[name]) for name, pipe in pipes.items()}
    figures = {f"{name}, seconds a step": median(values) for name, values in seconds.items()}
    figures["auto, how far its schedule may be from the best"] = found.gap
    for name in OURS[1:]:
        gain = ratio(seconds["pipert 1f1b"], seconds[f"pipert {name}"])
        expected = predicted["1f1b"] / predicted[name]
        figures |= {
            f"{name}, predicted step, s": predicted[name],
            f"{name}, makespan over predicted": median(each.makespan for each in lines[name]) / predicted[name],
            f"{name}, gain over 1F1B": gain,
            f"{name}, predicted gain over 1F1B": expected,
            f"{name}, gain over 1F1B, distance from the predicted one": abs(gain / expected - 1),
        }
    ours, theirs = (
        min((name for name in seconds if name.startswith(who)), key=lambda name: median(seconds[name]))
        for who in ("pipert", "torch")
    )
    return figures | {"speed of pipert's best over torch's best": ratio(seconds[theirs], seconds[ours])}


def _predicted(pipe: pipert.Pipeline, timelines: list[Timeline]) -> float:
    """What the step takes if its actions take what they took in the median, and messages nothing."""
    program = pipe.proof.target
    assert isinstance(program, Program)
    return simulate(program, measured_costs(timelines, program.num_stages)).makespan


def _torch_stages(mesh: pipert.Mesh, pipes: dict[str, pipert.Pipeline], name: str, chunks: int) -> dict[int, nn.Module]:
    """This rank's stages for torch, cut as pipert cuts them."""
    assignment = pipes["1f1b" if chunks == 1 else "zb-v"].partition.assignment
    blocks = dict(GPT(CONFIG, device="cpu").blocks())
    rank, ranks = mesh.pp_group.rank, mesh.pp
    own = [rank, 2 * ranks - 1 - rank] if name == "zb-v" else list(range(rank, ranks * chunks, ranks))
    return {stage: nn.Sequential(*(copy.deepcopy(blocks[block]) for block in assignment[stage])) for stage in own}


def _ours(pipe: pipert.Pipeline, batch: Batch) -> None:
    pipe.step(batch)
    for parameter in pipe.parameters():
        parameter.grad = None


def _theirs(pipeline: TorchPipeline, modules: dict[int, nn.Module], batch: Batch) -> None:
    pipeline.step(*batch)
    for module in modules.values():
        module.zero_grad()
