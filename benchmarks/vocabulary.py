"""What it brings to spread a vocabulary over all ranks of a pipeline (docs/vocabulary.md), for real models' operations.

* Balance: the heaviest stage over the mean, with embedding and head as blocks of the best cut there is, and spread.
* Step: the simulated step of 1F1B with four micro-batches a rank, messages free: with the best cut, over that with the
  vocabulary spread (backwards two forwards later). The least possible is the mean work of a rank.
* Lowering: processor milliseconds for the program with the vocabulary, 32 ranks, 128 micro-batches.

The last line is one JSON object with figures, bars and whether they hold; the exit code says the same.
"""

from __future__ import annotations

import sys
import time
from statistics import median

from _verdicts import Bar, conclude, verdicts
from partition import MODELS, Shape, costs

from pipert.graph import Block, ModelGraph, ParameterSpec
from pipert.partition import Partition, partition_graph
from pipert.scheduler import MPI, Costs, generate, lower, simulate
from pipert.scheduler.lower.delay import delay_backwards
from pipert.scheduler.vocabulary import Vocabulary

STAGES = (8, 16, 32)
NAMES = ("Llama-3 8B", "Gemma-2 9B", "GPT-3 6.7B 128k")
LAG = 2


def graph(shape: Shape) -> ModelGraph:
    """Embedding, layers, head; they weigh the operations of their products and of attention."""
    rows = (shape.vocabulary, shape.hidden)
    table = ParameterSpec("embedding.weight", rows, "bfloat16", 2, "embedding.weight", lookup=True)
    head = ParameterSpec("head.weight", rows, "bfloat16", 2, "head.weight")
    weights = costs(shape)
    names = ["embedding", *(f"layer {i}" for i in range(len(weights) - 2)), "head"]
    parameters = [(table,), *[()] * (len(weights) - 2), (head,)]
    return ModelGraph.chain(
        Block(name, parameters=own, forward=weight / 3, backward=2 * weight / 3)
        for name, own, weight in zip(names, parameters, weights, strict=True)
    )


def step(cut: Partition, microbatches: int) -> float:
    """The simulated step of 1F1B, each stage on a rank of its own."""
    ranks, spread = len(cut.stages), cut.vocabulary
    schedule = generate("1f1b", ranks, microbatches)
    forward, backward = [s.forward for s in cut.stages], [s.backward for s in cut.stages]
    if spread is None:
        return simulate(schedule, Costs(forward, backward)).makespan
    part = spread.forward / ranks, spread.backward / ranks
    own = Costs(
        [time - part[0] for time in forward],
        [time - part[1] for time in backward],
        logits=part[0] + part[1] / 2,
        head_gradient=part[1] / 2,
    )
    program = lower(delay_backwards(schedule, LAG), MPI, vocabulary=Vocabulary())
    return simulate(program, own).makespan


def lowering() -> float:
    schedule = delay_backwards(generate("1f1b", 32, 128), LAG)
    times = []
    for _ in range(5):
        start = time.process_time()
        lower(schedule, MPI, vocabulary=Vocabulary())
        times.append(1e3 * (time.process_time() - start))
    return median(times)


def measure() -> dict[str, float]:
    figures: dict[str, float] = {}
    print(
        f"{'model':18} {'stages':>6} {'ends':>7} {'spread':>7} {'step, ends over spread':>24} {'spread over mean':>18}"
    )
    for name in NAMES:
        model = graph(MODELS[name])
        for stages in STAGES:
            ends, spread = (partition_graph(model, stages, spread_vocabulary=on) for on in (False, True))
            slow, fast = step(ends, 4 * stages), step(spread, 4 * stages)
            least = 4 * stages * sum(stage.cost for stage in ends.stages) / stages
            row = 1 / ends.balance, 1 / spread.balance, slow / fast, fast / least
            print(f"{name:18} {stages:6} {row[0]:7.2f} {row[1]:7.2f} {row[2]:24.2f} {row[3]:18.2f}")
            for what, value in zip(("ends", "spread", "step", "over mean"), row, strict=True):
                figures[f"{name}, {stages} stages, {what}"] = value
    figures["lowering, ms"] = lowering()
    return figures


BARS: tuple[Bar, ...] = (
    *((f"Llama-3 8B, {stages} stages, spread", "at most", 1.01) for stages in STAGES),
    *((f"Llama-3 8B, {stages} stages, step", "at least", 1.05) for stages in STAGES),
)


def main() -> int:
    figures = measure()
    return conclude("vocabulary", figures, verdicts(figures, BARS))


if __name__ == "__main__":
    sys.exit(main())
