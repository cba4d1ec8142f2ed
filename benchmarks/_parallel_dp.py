"""Part of ``parallel.py``: replicas with their state shared out (ZeRO), and a pipeline, against torch DDP and FSDP2.

A GPT on 2 ranks, one thread each, with a head as heavy as a block. All train the same global batch with AdamW, in
micro-batches of one size, and take turns step by step. Bytes are counted by pipert's transport and compared with the
formulas of ``docs/zero.md``. The pipeline, which shares the weights out like FSDP does, is compared with the faster of
torch's two ways to do so; DDP, with everything on every rank and no bubble, stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from _memory import peak_bytes
from _parallel_torch import Batch, TorchRun
from _torch_pipeline import start_gloo
from _turns import all_turns, ratio

import pipert
from pipert.gpt_config import GPTConfig
from pipert.models import GPT, CausalLMLoss
from pipert.scheduler.action import Kind
from pipert.scheduler.program import Program

CONFIG = GPTConfig(layers=7, hidden=256, heads=4, sequence=128, vocabulary=3072, tied=False)
SAMPLES, MICRO_BATCH, RATE = 32, 4, 1e-3

#: pipert's contestants: ZeRO stage and the pipeline's arguments. From stage 2 on a stage of the pipeline is what is
#: gathered and scattered at once, as a block is for FSDP2, so there are as many as blocks.
OURS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero-1": (1, {}),
    "zero-2": (2, {"schedule": "interleaved", "chunks": CONFIG.layers}),
    "zero-3": (3, {"schedule": "interleaved", "chunks": CONFIG.layers}),
    "pp 2": (0, {"schedule": "zb-v"}),
}
#: Who is compared with whom in torch: what a user would take instead.
AGAINST = {"zero-1": ["ddp-zero1"], "zero-2": ["fsdp2"], "zero-3": ["fsdp3"], "pp 2": ["fsdp2", "fsdp3"]}


def run(mesh: pipert.Mesh, folder: Path, rounds: int) -> dict[str, float]:
    """Speed, memory and bytes of data parallelism on two ranks."""
    torch.set_num_threads(1)
    start_gloo(mesh, folder)
    whole = torch.randint(CONFIG.vocabulary, (SAMPLES, CONFIG.sequence), generator=torch.Generator().manual_seed(0))
    makers: dict[str, Callable[[], Callable[[], object]]] = {}
    for kind in ("ddp", "ddp-zero1", "fsdp2", "fsdp3"):
        makers[f"torch {kind}"] = lambda kind=kind: _theirs(kind, mesh, whole)  # type: ignore[misc]
    meshes = {name: pipert.Mesh.from_transport(mesh.world, **{"pp" if "pp" in name else "dp": 2}) for name in OURS}
    for name in OURS:
        makers[f"pipert {name}"] = lambda name=name: _ours(name, meshes[name], whole)[0]  # type: ignore[misc]
    figures = {f"{name}, MB": peak_bytes(make) / 1e6 for name, make in makers.items()}
    seconds = all_turns(mesh, {name: make() for name, make in makers.items()}, rounds)
    for name, values in seconds.items():
        figures[f"{name}, tokens a second"] = SAMPLES * CONFIG.sequence / median(values)
    for name, others in AGAINST.items():
        ours = seconds[f"pipert {name}"]
        figures[f"{name}, speed against torch"] = min(ratio(seconds[f"torch {other}"], ours) for other in others)
        least = min(figures[f"torch {other}, MB"] for other in others)
        figures[f"{name}, memory against torch"] = figures[f"pipert {name}, MB"] / least
    figures["pp 2, speed over DDP's"] = ratio(seconds["torch ddp"], seconds["pipert pp 2"])
    for name, (zero, _) in OURS.items():
        if zero:
            figures[f"{name}, bytes moved over the formula's"] = _moved(name, meshes[name], whole)
    dist.destroy_process_group()
    return figures


def _share(mesh: pipert.Mesh, whole: torch.Tensor) -> Batch:
    """This replica's part of the global batch."""
    ids = whole.chunk(mesh.dp)[mesh.dp_rank]
    return ids, ids.roll(-1, 1)


def _ours(name: str, mesh: pipert.Mesh, whole: torch.Tensor) -> tuple[Callable[[], object], pipert.Pipeline]:
    zero, arguments = OURS[name]
    batch = _share(mesh, whole)
    arguments = {"microbatches": len(batch[0]) // MICRO_BATCH, **arguments}
    pipe = pipert.Pipeline(GPT(CONFIG), CausalLMLoss(), mesh, example=batch[0][:MICRO_BATCH], **arguments)
    optimizer = pipert.ZeroAdamW(pipe, lr=RATE, zero=zero)

    def step() -> None:
        pipe.step(batch)
        optimizer.step()
        optimizer.zero_grad()

    return step, pipe


def _theirs(kind: str, mesh: pipert.Mesh, whole: torch.Tensor) -> Callable[[], object]:
    ids = whole.chunk(mesh.world.size)[mesh.world.rank]
    batch = (ids, ids.roll(-1, 1))
    run = TorchRun(CONFIG, kind, CausalLMLoss(), len(ids) // MICRO_BATCH, RATE)
    return lambda: run.step(batch)


def _moved(name: str, mesh: pipert.Mesh, whole: torch.Tensor) -> float:
    """Bytes of a step and its update over the replicas' group, over those of the formula, in fp32."""
    step, pipe = _ours(name, mesh, whole)
    before = _counted(mesh)
    step()
    program = pipe.proof.target
    assert isinstance(program, Program)
    weights = {number: sum(p.nbytes for p in module.parameters()) for number, module in pipe.modules.items()}
    zero, total = OURS[name][0], sum(weights.values())
    scattered = total * (1 if zero == 1 else program.microbatches)
    gathers = [action.stage for _, action, _, _ in pipe.timeline() if action.kind is Kind.GATHER]
    gathered = sum(weights[stage] for stage in gathers) if zero == 3 else total
    return (_counted(mesh) - before) / (scattered + gathered)


def _counted(mesh: pipert.Mesh) -> int:
    counters = mesh.dp_group.counters  # type: ignore[attr-defined]
    return sum(counters.bytes[kind] for kind in ("allreduce", "allgather", "reduce_scatter"))
