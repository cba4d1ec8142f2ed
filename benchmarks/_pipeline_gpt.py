"""Part of ``pipeline.py``: a GPT on 2 ranks, one thread each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from _torch_pipeline import TorchPipeline, start_gloo
from _turns import take_turns
from torch import nn

import pipert
from pipert.engine.reference import reference_step
from pipert.gpt_config import GPTConfig
from pipert.models import GPT
from pipert.models.loss import CausalLMLoss
from pipert.report.measured import measured_costs
from pipert.scheduler.generators.registry import generate
from pipert.scheduler.simulate import simulate
from pipert.scheduler.timeline import Timeline

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2}
CONFIG = GPTConfig(layers=8, hidden=320, heads=5, sequence=128, vocabulary=2048, tied=False)
MICROBATCHES, SAMPLES = 8, 16


def run(mesh: pipert.Mesh, folder: Path, rounds: int) -> dict[str, float]:
    """Speed against one process with two threads, against torch, and against the prediction."""
    torch.set_num_threads(1)
    start_gloo(mesh, folder)
    loss = CausalLMLoss()
    ids = torch.randint(CONFIG.vocabulary, (SAMPLES, CONFIG.sequence), generator=torch.Generator().manual_seed(0))
    batch = (ids, ids.roll(-1, 1))
    whole = GPT(CONFIG, device="cpu")
    pipes: dict[str, pipert.Pipeline] = {}
    contestants: dict[str, Callable[[], object]] = {"one process": lambda: _alone(mesh, whole, batch)}
    for name, chunks in SCHEDULES.items():
        pipe = pipert.Pipeline(
            GPT(CONFIG), loss, mesh, schedule=name, microbatches=MICROBATCHES, chunks=chunks, example=ids[:2]
        )
        modules = {number: _torch_stage(pipe, whole, number) for number in pipe.modules}
        theirs = TorchPipeline(list(modules.items()), mesh.pp * chunks, name, MICROBATCHES, loss)
        pipes[f"pipert {name}"] = pipe
        contestants[f"pipert {name}"] = lambda pipe=pipe: _ours(pipe, batch)  # type: ignore[misc]
        contestants[f"torch {name}"] = lambda theirs=theirs, m=modules: _theirs(theirs, m, batch)  # type: ignore[misc]
    timelines: dict[str, list[Timeline]] = {name: [] for name in pipes}
    seconds = take_turns(
        mesh, contestants, rounds, lambda name: name in pipes and timelines[name].append(pipes[name].timeline())
    )
    dist.destroy_process_group()
    figures = {"one process, seconds a step": seconds["one process"]}
    for name, chunks in SCHEDULES.items():
        ours, measured = seconds[f"pipert {name}"], timelines[f"pipert {name}"]
        costs = measured_costs(measured, mesh.pp * chunks)
        predicted = simulate(generate(name, mesh.pp, MICROBATCHES, chunks), costs).makespan
        figures |= {
            f"{name}, seconds a step": ours,
            f"{name}, speed against one process": seconds["one process"] / ours,
            f"{name}, speed against torch": seconds[f"torch {name}"] / ours,
            f"{name}, predicted against measured step": predicted / ours,
            f"{name}, predicted against measured makespan": predicted / median(each.makespan for each in measured),
        }
    return figures


def _torch_stage(pipe: pipert.Pipeline, whole: GPT, number: int) -> nn.Module:
    """The same blocks as pipert's stage, as torch wants them."""
    blocks = dict(whole.blocks())
    return nn.Sequential(*(blocks[name] for name in pipe.partition.assignment[number]))


def _ours(pipe: pipert.Pipeline, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    pipe.step(batch)
    for parameter in pipe.parameters():
        parameter.grad = None


def _theirs(pipeline: TorchPipeline, modules: dict[int, nn.Module], batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    pipeline.step(*batch)
    for module in modules.values():
        module.zero_grad()


def _alone(mesh: pipert.Mesh, model: GPT, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    if mesh.world.rank == 0:
        torch.set_num_threads(mesh.world.size)
        reference_step(model, CausalLMLoss(), batch, MICROBATCHES)
        model.zero_grad()
        torch.set_num_threads(1)
