"""Part of ``parallel.py``: a GPT whose layers 2 ranks share, one thread each, against torch's DTensor on gloo.

Both train the same shape with AdamW and take turns step by step. Bytes are counted by pipert's transport and compared
with the formulas of ``docs/layouts.md``. Memory is parameters, gradients and moments (all alike: four times the
parameters) and what autograd keeps of a micro-batch for its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from _torch_pipeline import start_gloo
from _turns import all_turns, ratio
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional as F

import pipert
from pipert.gpt_config import GPTConfig
from pipert.models import GPT, CausalLMLoss

CONFIG = GPTConfig(layers=4, hidden=256, heads=4, sequence=128, vocabulary=2048, tied=False)
SAMPLES, MICROBATCHES, RATE = 8, 2, 1e-3
Batch = tuple[torch.Tensor, torch.Tensor]


def run(mesh: pipert.Mesh, folder: Path, rounds: int) -> dict[str, float]:
    """Speed, memory and bytes of tensor parallelism over all ranks of a mesh."""
    torch.set_num_threads(1)
    start_gloo(mesh, folder)
    ids = torch.randint(CONFIG.vocabulary, (SAMPLES, CONFIG.sequence), generator=torch.Generator().manual_seed(0))
    batch = (ids, ids.roll(-1, 1))
    own = pipert.Mesh.from_transport(mesh.world, tp=mesh.size)
    ours = {
        name: Ours(own, sequence_parallel=name.endswith("sequence")) for name in ("pipert tp", "pipert tp sequence")
    }
    theirs = Theirs(mesh.size)
    contestants: dict[str, Callable[[], object]] = {
        name: (lambda run=run: run.step(batch)) for name, run in ours.items()
    }
    contestants["torch tp"] = lambda: theirs.step(batch)
    seconds = all_turns(mesh, contestants, rounds)
    tokens, figures = SAMPLES * CONFIG.sequence, {}
    for name, values in seconds.items():
        figures[f"{name}, tokens a second"] = tokens / median(values)
    figures["tp, speed against torch"] = ratio(seconds["torch tp"], seconds["pipert tp"])
    figures["tp sequence, speed against torch"] = ratio(seconds["torch tp"], seconds["pipert tp sequence"])
    figures["torch tp, MB"] = theirs.memory(batch) / 1e6
    for name, each in ours.items():
        figures[f"{name}, MB"] = each.memory(batch) / 1e6
        figures[f"{name}, memory against torch"] = figures[f"{name}, MB"] / figures["torch tp, MB"]
        counted, formula = each.bytes(batch)
        figures[f"{name}, MB moved a step"] = counted / 1e6
        figures[f"{name}, bytes moved over the formula's"] = counted / formula
    dist.destroy_process_group()
    return figures


class Ours:
    """pipert's GPT on the ranks of a mesh."""

    def __init__(self, mesh: pipert.Mesh, *, sequence_parallel: bool) -> None:
        self._mesh, self._sequence = mesh, sequence_parallel
        model = pipert.parallelize(GPT(CONFIG), mesh, sequence_parallel=sequence_parallel)
        self._pipe = pipert.Pipeline(model, CausalLMLoss(), mesh, microbatches=MICROBATCHES)
        self._optimizer = torch.optim.AdamW(self._pipe.parameters(), lr=RATE, foreach=True)

    def step(self, batch: Batch) -> None:
        """Forward, backward and update."""
        self._pipe.step(batch)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def memory(self, batch: Batch) -> float:
        """Bytes of parameters, gradients, moments and one micro-batch's activations."""
        parameters = list(self._pipe.parameters())
        with counting(parameters) as kept:
            self._pipe.step([(batch[0][: SAMPLES // MICROBATCHES], batch[1][: SAMPLES // MICROBATCHES])])
        self._optimizer.zero_grad()
        return 4 * sum(p.nbytes for p in parameters) + sum(kept.values())

    def bytes(self, batch: Batch) -> tuple[float, float]:
        """What a step moves over the tensor-parallel group: as the transport counts it, and by the formulas."""
        before = self._counted()
        self._pipe.step(batch)
        return self._counted() - before, formula(sequence_parallel=self._sequence)

    def _counted(self) -> int:
        counters = self._mesh.tp_group.counters  # type: ignore[attr-defined]
        return sum(counters.bytes[kind] for kind in ("allreduce", "allgather", "reduce_scatter"))


def formula(*, sequence_parallel: bool) -> float:
    """Bytes of a step, in fp32; of each collective the whole tensor's."""
    tokens = SAMPLES * CONFIG.sequence
    whole = 4 * tokens * CONFIG.hidden
    loss = 4 * (1 + 3) * tokens
    layers = CONFIG.layers * (10 if sequence_parallel else 4) + (5 if sequence_parallel else 2)
    summed = 0
    if sequence_parallel:  # norms, biases of row layers, positions: once a step
        vectors = CONFIG.layers * (4 + 2) + 2
        summed = 4 * CONFIG.hidden * (vectors + CONFIG.sequence)
    return layers * whole + loss + summed


class Theirs:
    """The same shape in torch's layers, shared out by torch's DTensor, with its loss on shared-out logits."""

    def __init__(self, ranks: int) -> None:
        mesh = init_device_mesh("cpu", (ranks,))
        self._model = TorchGPT()
        plan: dict[str, Any] = {
            "embedding": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        }
        for number in range(CONFIG.layers):
            for name in ("q", "k", "v", "up"):
                plan[f"blocks.{number}.{name}"] = ColwiseParallel()
            for name in ("o", "down"):
                plan[f"blocks.{number}.{name}"] = RowwiseParallel()
        parallelize_module(self._model, mesh, plan)
        parameters = list(self._model.parameters())
        kinds = ([p for p in parameters if isinstance(p, DTensor) is shared] for shared in (True, False))
        self._optimizers = [torch.optim.AdamW(kind, lr=RATE, foreach=True) for kind in kinds]  # which cannot be mixed

    def step(self, batch: Batch) -> None:
        """Forward, backward and update."""
        for inputs, targets in zip(*(side.chunk(MICROBATCHES) for side in batch), strict=True):
            self._backward(inputs, targets)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def _backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        with loss_parallel():
            logits = self._model(inputs)
            (F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / MICROBATCHES).backward()

    def memory(self, batch: Batch) -> float:
        """Bytes of parameters, gradients, moments and one micro-batch's activations."""
        parameters = [local(p) for p in self._model.parameters()]
        with counting(parameters) as kept:
            self._backward(batch[0][: SAMPLES // MICROBATCHES], batch[1][: SAMPLES // MICROBATCHES])
        self._model.zero_grad()
        return 4 * sum(p.nbytes for p in parameters) + sum(kept.values())


class TorchBlock(nn.Module):
    """The block of a GPT, with projections apart, as ColwiseParallel needs them."""

    def __init__(self) -> None:
        super().__init__()
        h = CONFIG.hidden
        self.attention_norm, self.mlp_norm = nn.LayerNorm(h), nn.LayerNorm(h)
        self.q, self.k, self.v, self.o = (nn.Linear(h, h) for _ in range(4))
        self.up, self.down = nn.Linear(h, CONFIG.mlp_width), nn.Linear(CONFIG.mlp_width, h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.attention_norm(x)
        q, k, v = (p(y).unflatten(-1, (-1, CONFIG.head_width)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class TorchGPT(nn.Module):
    """The model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CONFIG.vocabulary, CONFIG.hidden)
        self.position = nn.Parameter(torch.zeros(CONFIG.sequence, CONFIG.hidden))
        self.blocks = nn.ModuleList(TorchBlock() for _ in range(CONFIG.layers))
        self.norm = nn.LayerNorm(CONFIG.hidden)
        self.head = nn.Linear(CONFIG.hidden, CONFIG.vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def counting(parameters: list[torch.Tensor]) -> Iterator[dict[int, int]]:
    """Bytes that autograd keeps, by memory, without those of parameters."""
    fixed = {local(p).untyped_storage().data_ptr() for p in parameters}
    kept: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        memory = local(tensor).untyped_storage()
        if memory.data_ptr() not in fixed:
            kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        yield kept
