"""Part of ``schedules.py``: a GPT on 2 ranks, one thread each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from _torch_pipeline import TorchPipeline, start_gloo
from _turns import all_turns, ratio
from torch import nn

import pipert
from pipert.engine.balance import balanced_counts
from pipert.gpt_config import GPTConfig
from pipert.graph.model_graph import ModelGraph
from pipert.models import GPT
from pipert.models.loss import CausalLMLoss
from pipert.partition.solve import partition_graph
from pipert.report.measured import measured_costs
from pipert.scheduler.placement import Placement
from pipert.scheduler.program import Program
from pipert.scheduler.simulate import simulate
from pipert.scheduler.timeline import Timeline

#: GPT-2's proportions (heads 64 wide, an MLP of four times the width) at a size for one core a rank: 16 million
#: parameters. The head has as many weights as a block, so that is eight equal parts, which two ranks and four stages
#: share evenly. Four micro-batches of one sequence, twice as many as ranks: 1F1B's bubble is a fifth.
CONFIG = GPTConfig(layers=7, hidden=384, heads=6, sequence=256, vocabulary=12 * 384, tied=False)
MICROBATCHES, SAMPLES = 4, 4
#: The searched schedule may keep three micro-batches on a rank; 1F1B keeps two, interleaved 1F1B two and a half.
AUTO = pipert.AutoOptions(in_flight=3)
OURS = ("1f1b", "zb-h1", "zb-v", "auto")
THEIRS = ("1f1b", "interleaved", "interleaved-zb", "zb-v")
PLACEMENTS: dict[str, Callable[[int], Placement]] = {
    "1f1b": Placement.linear,
    "zb-h1": Placement.linear,
    "zb-v": Placement.v,
    "interleaved": lambda ranks: Placement.looped(ranks, 2),
    "interleaved-zb": lambda ranks: Placement.looped(ranks, 2),
}

Batch = tuple[torch.Tensor, torch.Tensor]


def run(mesh: pipert.Mesh, folder: Path, rounds: int) -> dict[str, float]:
    """What zero-bubble schedules gain over 1F1B, measured and predicted, and the best against torch's best."""
    torch.set_num_threads(1)
    start_gloo(mesh, folder)
    loss = CausalLMLoss()
    ids = torch.randint(CONFIG.vocabulary, (SAMPLES, CONFIG.sequence), generator=torch.Generator().manual_seed(0))
    batch = (ids, ids.roll(-1, 1))
    example = ids[: SAMPLES // MICROBATCHES]
    searched = pipert.Pipeline(GPT(CONFIG), loss, mesh, "auto", MICROBATCHES, example=example, auto=AUTO)
    cuts = {name: _cuts(searched.graph, PLACEMENTS[name](mesh.pp)) for name in PLACEMENTS}
    pipes = {
        name: pipert.Pipeline(GPT(CONFIG), loss, mesh, name, MICROBATCHES, cuts=cuts[name]) for name in OURS[:-1]
    } | {"auto": searched}
    for _ in range(8):
        _ours(searched, batch)
    found = searched.replan()
    contestants: dict[str, Callable[[], object]] = {}
    for name, pipe in pipes.items():
        contestants[f"pipert {name}"] = lambda pipe=pipe: _ours(pipe, batch)  # type: ignore[misc]
    for name in THEIRS:
        modules = _torch_stages(mesh, PLACEMENTS[name](mesh.pp), cuts[name])
        theirs = TorchPipeline(list(modules.items()), len(cuts[name]), name, MICROBATCHES, loss)
        contestants[f"torch {name}"] = lambda theirs=theirs, m=modules: _theirs(theirs, m, batch)  # type: ignore[misc]
    lines: dict[str, list[Timeline]] = {name: [] for name in pipes}

    def note(name: str) -> None:
        whose, _, schedule = name.partition(" ")
        if whose == "pipert":
            lines[schedule].append(pipes[schedule].timeline())

    seconds = all_turns(mesh, contestants, rounds, note)
    dist.destroy_process_group()
    predicted = {name: [_predicted(pipe, line) for line in lines[name]] for name, pipe in pipes.items()}
    figures = {f"{name}, seconds a step": median(values) for name, values in seconds.items()}
    figures["auto, how far its schedule may be from the best"] = found.gap
    for name in OURS[1:]:
        expected = [plain / mine for plain, mine in zip(predicted["1f1b"], predicted[name], strict=True)]
        gains = [plain / mine for plain, mine in zip(seconds["pipert 1f1b"], seconds[f"pipert {name}"], strict=True)]
        figures |= {
            f"{name}, makespan over predicted": ratio([each.makespan for each in lines[name]], predicted[name]),
            f"{name}, gain over 1F1B": median(gains),
            f"{name}, predicted gain over 1F1B": median(expected),
            f"{name}, gain over 1F1B, distance from the predicted one": abs(ratio(gains, expected) - 1),
        }
    ours, theirs = (
        min((name for name in seconds if name.startswith(who)), key=lambda name: median(seconds[name]))
        for who in ("pipert", "torch")
    )
    return figures | {"speed of pipert's best over torch's best": ratio(seconds[theirs], seconds[ours])}


def _predicted(pipe: pipert.Pipeline, timeline: Timeline) -> float:
    """What a step takes if its actions take what they took in it, on average for each stage, and messages nothing.

    From the step's own times, since a shared machine's cores are fast and slow by turns, each for itself.
    """
    program = pipe.proof.target
    assert isinstance(program, Program)
    return simulate(program, measured_costs([timeline], program.num_stages)).makespan


def _cuts(graph: ModelGraph, placement: Placement) -> tuple[int, ...]:
    """The same cuts for all schedules with this placement: equal work for the ranks."""
    return balanced_counts(graph, partition_graph(graph, placement.num_stages), placement)


def _torch_stages(mesh: pipert.Mesh, placement: Placement, cuts: tuple[int, ...]) -> dict[int, nn.Module]:
    """This rank's stages for torch."""
    blocks = [block for _, block in GPT(CONFIG, device="cpu").blocks()]
    ends = [sum(cuts[: stage + 1]) for stage in range(len(cuts))]
    return {
        stage: nn.Sequential(*blocks[ends[stage] - cuts[stage] : ends[stage]])
        for stage in placement.stages_of(mesh.pp_group.rank)
    }


def _ours(pipe: pipert.Pipeline, batch: Batch) -> None:
    pipe.step(batch)
    for parameter in pipe.parameters():
        parameter.grad = None


def _theirs(pipeline: TorchPipeline, modules: dict[int, nn.Module], batch: Batch) -> None:
    pipeline.step(*batch)
    for module in modules.values():
        module.zero_grad()
