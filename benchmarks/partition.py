"""The partitioner: how fast it cuts 10,000 blocks, and how much better than the usual rules it cuts real models.

* ``cut``: 10,000 blocks on 1,024 stages, for several kinds of costs, processor milliseconds (median of 15), the
  kernels compiled before. ``all`` is the whole call, from a graph of blocks to a partition with its table's figures.
* Models: blocks weigh the floating-point operations of their forward and backward (matrix products and causal
  attention; a lookup multiplies nothing). The heaviest stage of each rule over ours, the least and the largest over
  stage counts: ``uniform`` gives every stage as many layers (Megatron-LM's default), the embedding on top of the first
  and the head on top of the last; ``one layer`` counts embedding and head as a layer each. Where numbers do not divide,
  the first stages get one layer more (Megatron-LM refuses then).
* ``exact``: our heaviest stage over the least possible one, by a plain dynamic program over all cuts.

The last line is one JSON object with figures, bars and whether they hold; the exit code says the same.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np
from _verdicts import conclude

from pipert.graph import Block, ModelGraph, ParameterSpec
from pipert.partition import chain_cuts, partition_graph

BLOCKS, STAGES = 10_000, 1_024


@dataclass(frozen=True)
class Shape:
    """A decoder. ``windows``: how far attention looks back, layers in turn; ``gated``: three matrices, not two."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    sequence: int
    gated: bool = True
    windows: tuple[int, ...] = (1 << 30,)


MODELS = {
    "Llama-3 8B": Shape(32, 4096, 14336, 32, 8, 128, 128_256, 8192),
    "Llama-3 70B": Shape(80, 8192, 28672, 64, 8, 128, 128_256, 8192),
    "Gemma-2 9B": Shape(42, 3584, 14336, 16, 8, 256, 256_000, 8192, windows=(4096, 1 << 30)),
    "Gemma-2 27B": Shape(46, 4608, 36864, 32, 16, 128, 256_000, 8192, windows=(4096, 1 << 30)),
    "GPT-3 6.7B 128k": Shape(32, 4096, 16384, 32, 32, 128, 128_000, 2048, gated=False),
    "GPT-3 6.7B 256k": Shape(32, 4096, 16384, 32, 32, 128, 256_000, 2048, gated=False),
    "GPT-3 175B 128k": Shape(96, 12288, 49152, 96, 96, 128, 128_000, 2048, gated=False),
    "GPT-3 175B 256k": Shape(96, 12288, 49152, 96, 96, 128, 256_000, 2048, gated=False),
}
STAGE_COUNTS = (2, 4, 8, 16, 32)


def layer(shape: Shape, window: int) -> float:
    """Operations per token of one layer's forward."""
    projections = shape.hidden * shape.head * (2 * shape.heads + 2 * shape.kv_heads)
    products = (3 if shape.gated else 2) * shape.hidden * shape.inner
    seen = float(np.minimum(np.arange(1, shape.sequence + 1), window).mean())
    return 2.0 * (projections + products) + 4.0 * seen * shape.heads * shape.head


def costs(shape: Shape) -> list[float]:
    """Operations per token of forward and backward: embedding, layers, head."""
    windows = [shape.windows[i % len(shape.windows)] for i in range(shape.layers)]
    return [3.0 * c for c in (0.0, *(layer(shape, w) for w in windows), 2.0 * shape.hidden * shape.vocabulary)]


def shares(things: int, stages: int) -> list[int]:
    """As equal as they get, the first ones larger."""
    return [things // stages + (s < things % stages) for s in range(stages)]


def heaviest(weights: list[float], counts: list[int]) -> float:
    places = np.cumsum([0, *counts])
    return max(sum(weights[a:b]) for a, b in pairwise(places))


def uniform(weights: list[float], stages: int) -> float:
    counts = shares(len(weights) - 2, stages)
    counts[0] += 1
    counts[-1] += 1
    return heaviest(weights, counts)


def one_layer(weights: list[float], stages: int) -> float:
    return heaviest(weights, shares(len(weights), stages))


def least(weights: list[float], stages: int) -> float:
    """The least possible heaviest stage: a dynamic program over every last cut."""
    prefix = np.cumsum([0.0, *weights])
    best = prefix.copy()
    for _ in range(stages - 1):
        best = np.array([np.maximum(best[: j + 1], prefix[j] - prefix[: j + 1]).min() for j in range(len(prefix))])
    return float(best[-1])


def milliseconds(call: Callable[[], object]) -> float:
    """Processor time, so that other work on the machine does not count."""
    call()
    times = []
    for _ in range(15):
        start = time.process_time()
        call()
        times.append(1e3 * (time.process_time() - start))
    return median(times)


def speed() -> dict[str, float]:
    random = np.random.default_rng(0)
    kinds = {
        "equal": np.ones(BLOCKS),
        "uniform": random.random(BLOCKS),
        "log-normal": random.lognormal(0.0, 1.0, BLOCKS),
        "one giant": np.concatenate((random.random(BLOCKS - 1), [100.0])),
    }
    figures = {}
    for kind, weights in kinds.items():
        values = weights.tolist()
        figures[f"cut, {kind} costs, ms"] = milliseconds(lambda values=values: chain_cuts(values, STAGES))
    blocks = [
        Block(f"b{i}", "Toy", (ParameterSpec(f"b{i}.w", (8, 8), "float32", 4, f"b{i}.w"),), 0, c / 3, c * 2 / 3, 64)
        for i, c in enumerate(kinds["uniform"].tolist())
    ]
    graph = ModelGraph.chain(blocks)
    figures["all, uniform costs, ms"] = milliseconds(lambda: partition_graph(graph, STAGES))
    return figures


def quality() -> dict[str, float]:
    figures = {}
    print(f"{'model':18} {'stages':>6} {'balance':>8} {'uniform':>8} {'one layer':>10}   heaviest stage over ours")
    for name, shape in MODELS.items():
        weights = costs(shape)
        rows = []
        for stages in STAGE_COUNTS:
            counts = [b - a for a, b in pairwise(chain_cuts(weights, stages))]
            ours = heaviest(weights, counts)
            others = uniform(weights, stages) / ours, one_layer(weights, stages) / ours
            rows.append((*others, ours / least(weights, stages)))
            balance = sum(weights) / stages / ours
            print(f"{name:18} {stages:6} {100 * balance:7.1f}% {others[0]:8.3f} {others[1]:10.3f}   {counts}")
        for column, rule in enumerate(("uniform", "one layer")):
            ratios = [row[column] for row in rows]
            figures[f"{name}, {rule} over ours, least"] = min(ratios)
            figures[f"{name}, {rule} over ours, largest"] = max(ratios)
        figures[f"{name}, ours over exact"] = max(row[2] for row in rows)
    return figures


BARS: tuple[tuple[str, str, float], ...] = (
    ("cut, ", "at most", 20.0),
    (" over ours, least", "at least", 1.0),
    (", ours over exact", "at most", 1.0),
)
ROUNDING = 1e-12


def main() -> int:
    figures = quality() | speed()
    for name, value in figures.items():
        print(f"{name:50} {value:10.4g}")
    bars = {
        name: {
            "bar": f"{sense} {bar}",
            "ok": value >= bar - ROUNDING if sense == "at least" else value <= bar + ROUNDING,
        }
        for name, value in figures.items()
        for part, sense, bar in BARS
        if part in name
    }
    return conclude("partition", figures, bars)


if __name__ == "__main__":
    sys.exit(main())
