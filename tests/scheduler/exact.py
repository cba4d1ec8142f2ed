"""The exact optimum by OR-tools CP-SAT, as a reference for bounds and search. Memory is written as precedence."""

from __future__ import annotations

import random
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from pipert.scheduler.costs import Costs


class Exact(NamedTuple):
    """What CP-SAT knows: the best makespan it found, a bound, and whether they meet."""

    makespan: float
    bound: float
    proved: bool


def optimum(
    costs: Costs, ranks: int, microbatches: int, keeps: int, *, hint: float = 0.0, seconds: float = 10
) -> Exact:
    """The least makespan of one stage a rank; durations must be whole numbers.

    Args:
        costs: F, I, W and hand-overs.
        ranks: of the pipeline.
        microbatches: of a step.
        keeps: k, the memory: F(s, j) begins no earlier than W(s, j − k) ends.
        hint: a makespan that somebody reached: nothing longer is looked for.
        seconds: how long to look.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    table = costs.table(ranks).astype(int)
    horizon = int(hint) if hint else int(table.sum()) * microbatches * 2
    kinds = {"F": table[0], "I": table[2], "W": table[3]}
    begin: dict[tuple[str, int, int], Any] = {}
    spans: dict[int, list[Any]] = {stage: [] for stage in range(ranks)}
    for kind, stage, batch in product(kinds, range(ranks), range(microbatches)):
        begin[kind, stage, batch] = start = model.new_int_var(0, horizon, f"{stage}{kind}{batch}")
        spans[stage].append(model.new_fixed_size_interval_var(start, int(kinds[kind][stage]), ""))

    def after(later: tuple[str, int, int], earlier: tuple[str, int, int], lag: int = 0) -> None:
        model.add(begin[later] >= begin[earlier] + int(kinds[earlier[0]][earlier[1]]) + lag)

    hops = np.asarray(table[4])
    last = model.new_int_var(0, horizon, "makespan")
    for stage, batch in product(range(ranks), range(microbatches)):
        after(("I", stage, batch), ("F", stage, batch))
        after(("W", stage, batch), ("I", stage, batch))
        model.add(last >= begin["W", stage, batch] + int(table[3][stage]))
        if stage:
            after(("F", stage, batch), ("F", stage - 1, batch), int(hops[stage - 1]))
            after(("I", stage - 1, batch), ("I", stage, batch), int(hops[stage - 1]))
        if batch:
            for kind in kinds:
                after((kind, stage, batch), (kind, stage, batch - 1))
        if batch >= keeps:
            after(("F", stage, batch), ("W", stage, batch - keeps))
    for intervals in spans.values():
        model.add_no_overlap(intervals)
    model.minimize(last)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Exact(float("inf"), solver.best_objective_bound, False)
    return Exact(solver.objective_value, solver.best_objective_bound, status == cp_model.OPTIMAL)


def random_costs(draw: random.Random, ranks: int) -> Costs:
    """Unequal times for every stage in whole numbers: slow links, a heavy last stage, and stages alike now and then."""
    forward, inputs = ([draw.randint(5, 20) for _ in range(ranks)] for _ in range(2))
    weights = [draw.randint(3, 20) for _ in range(ranks)]
    if draw.random() < 0.25:
        forward, inputs, weights = ([draw.randint(5, 20)] * ranks for _ in range(3))
    if draw.random() < 0.25:
        for times in (forward, inputs, weights):
            times[-1] *= 2
    slow = draw.choice((0, 2, 6, 20))
    comm = [draw.randint(0, slow) for _ in range(ranks)]
    whole = [one + other for one, other in zip(inputs, weights, strict=True)]
    return Costs(forward, whole, inputs, weights, comm)
