"""The search for schedules: how often it finds the best one, and how long it takes.

* ``optimal``: of random pipelines (2 to 4 ranks, 2 to 8 micro-batches, memory p and 2p, unequal times, a heavy last
  stage or slow links now and then), how many get a schedule that is proved to be the fastest: it reaches the lower
  bound, or OR-tools CP-SAT finds nothing faster and proves that. What CP-SAT cannot decide in its time counts as not
  optimal, at the gap to CP-SAT's bound. ``worst gap``: the largest share above the optimum. ``worse than fixed``: how
  many take longer than the best schedule with a name and the same memory.
* ``64 x 256``: processor seconds for 64 unequal stages and 256 micro-batches with the memory of 1F1B and twice that,
  median of 3, the kernels compiled before. ``first search of a process``: the same in a fresh one, which imports the
  compiler and loads the kernels from the disk.

The last line is one JSON object with figures, bars and whether they hold; the exit code says the same. ``--instances``
changes how many random pipelines there are (300 take some minutes), ``--seed`` which.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from _verdicts import conclude, named

from pipert.scheduler.costs import Costs
from pipert.scheduler.generators.registry import GENERATORS, generate
from pipert.scheduler.placement import Placement
from pipert.scheduler.search import search
from pipert.scheduler.simulate import simulate
from tests.scheduler.exact import optimum, random_costs

#: What has to hold.
BARS: dict[str, tuple[str, float]] = {
    "optimal, share": ("at least", 0.95),
    "worst gap": ("at most", 0.03),
    "worse than fixed": ("at most", 0.0),
    "64 x 256, memory p, s": ("at most", 1.0),
    "64 x 256, memory 2p, s": ("at most", 1.0),
}

#: Seconds for which CP-SAT may look at one pipeline.
PATIENCE = 30.0


def quality(instances: int, seed: int) -> dict[str, float]:
    draw = random.Random(seed)
    gaps, by_bound, worse, undecided, took = [], 0, 0, 0, []
    for number in range(instances):
        ranks, microbatches = draw.randint(2, 4), draw.randint(2, 8)
        keeps = ranks * draw.choice((1, 2))
        costs = random_costs(draw, ranks)
        begin = time.process_time()
        found = search(costs, ranks, microbatches, limits=keeps)
        took.append(time.process_time() - begin)
        worse += found.makespan > best_fixed(costs, ranks, microbatches, keeps)
        if found.optimal:
            by_bound += 1
            gaps.append(0.0)
            continue
        exact = optimum(costs, ranks, microbatches, keeps, hint=found.makespan, seconds=PATIENCE)
        undecided += not exact.proved
        gaps.append(found.makespan / (exact.makespan if exact.proved else exact.bound) - 1)
        if gaps[-1] > 0:
            print(f"{number}: {ranks} x {microbatches}, memory {keeps}: {found}, CP-SAT {exact}", flush=True)
    return {
        "instances": instances,
        "optimal, share": sum(gap <= 0 for gap in gaps) / instances,
        "reach the lower bound, share": by_bound / instances,
        "undecided by CP-SAT": undecided,
        "worst gap": max(gaps),
        "worse than fixed": worse,
        "small pipelines, s (median)": median(took),
    }


def best_fixed(costs: Costs, ranks: int, microbatches: int, keeps: int) -> float:
    """The best makespan of the schedules with a name, one stage a rank, within the memory."""
    made = (generate(name, ranks, microbatches) for name, entry in GENERATORS.items() if entry.stages == 1)
    timelines = (simulate(one, costs) for one in made if one.placement == Placement.linear(ranks))
    return min(timeline.makespan for timeline in timelines if max(timeline.peaks) <= keeps)


def uneven(stages: int = 64) -> Costs:
    """Times of stages that differ by up to a fifth from one another's mean."""
    draw = random.Random(0)
    forward, inputs, weights = ([draw.uniform(0.8, 1.2) for _ in range(stages)] for _ in range(3))
    whole = [one + other for one, other in zip(inputs, weights, strict=True)]
    return Costs(forward, whole, inputs, weights, comm=0.05)


def speed() -> dict[str, float]:
    costs, stages, figures = uneven(), 64, {}
    for name, keeps in (("p", stages), ("2p", 2 * stages)):
        took = []
        for _ in range(4):
            begin = time.process_time()
            found = search(costs, stages, 256, limits=keeps)
            took.append(time.process_time() - begin)
        figures[f"64 x 256, memory {name}, s"] = median(took[1:])
        figures[f"64 x 256, memory {name}, gap to bound"] = found.gap
    again = "import search, time; costs, stages = search.uneven(), 64; begin = time.process_time()"
    again += "; search.search(costs, stages, 256, limits=stages); print(time.process_time() - begin)"
    done = subprocess.run([sys.executable, "-c", again], cwd=Path(__file__).parent, capture_output=True, check=True)
    return figures | {"64 x 256, memory p, first search of a process, s": float(done.stdout)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    figures = speed() | quality(options.instances, options.seed)
    return conclude("search", figures, named(figures, BARS, "{:40} {:9.4f}"))


if __name__ == "__main__":
    sys.exit(main())
