"""A measured timeline is one that the program allows, on one clock."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipert.comm.local import run_ranks
from pipert.comm.mesh import Mesh
from pipert.engine.design import in_flight
from pipert.engine.pipeline import Pipeline
from pipert.scheduler.action import Kind
from pipert.scheduler.dependencies import makes, needs
from pipert.scheduler.generators.registry import generate
from pipert.scheduler.program import Program
from pipert.scheduler.timeline import Timeline
from tests.engine.world import tower, vectors


def measure(schedule: str, chunks: int, dp: int = 1) -> tuple[list[Timeline], Program]:
    model = tower(6)
    copies = [copy.deepcopy(model) for _ in range(3 * dp)]

    def rank(transport: Any) -> tuple[Timeline, Any]:
        mesh = Mesh.local(pp=3, dp=dp)
        pipe = Pipeline(copies[transport.rank], F.mse_loss, mesh, schedule=schedule, chunks=chunks, microbatches=4)
        pipe.step(vectors(4))
        pipe.step(vectors(4))
        pipe.eval_step(vectors(4))
        return pipe.timeline(), pipe.proof.target

    found = run_ranks(3 * dp, rank)
    return [timeline for timeline, _ in found], found[0][1]


@pytest.mark.parametrize(("schedule", "chunks", "dp"), [("1f1b", 1, 1), ("interleaved", 2, 1), ("gpipe", 1, 2)])
def test_every_action_of_the_last_step_is_there_and_none_before_what_it_needs(
    schedule: str, chunks: int, dp: int
) -> None:
    timelines, program = measure(schedule, chunks, dp)
    assert timelines.count(timelines[0]) >= 3  # the same on every rank of a pipeline
    timeline = timelines[0]
    assert timeline.name == schedule
    assert [timeline.lane(rank).codes.tolist() for rank in range(3)] == [row.codes.tolist() for row in program.rows]
    assert timeline.start == 0.0
    made: dict[Any, float] = {}
    for _, action, _, end in timeline:
        if action.kind.is_compute:
            made.update((value, end) for value in makes(action))
    for _, action, start, _ in timeline:
        if action.kind.is_compute:
            assert all(made[value] <= start for value in needs(action, program.num_stages)), action


class Sleeping(nn.Module):
    """Sleeps in its forward, twice as long in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: time.sleep(0.04))
        return y


def test_sleeping_stages_overlap_as_the_schedule_says() -> None:
    def rank(transport: Any) -> Timeline:
        model = nn.Sequential(Sleeping(), Sleeping()).double()
        pipe = Pipeline(model, F.mse_loss, Mesh.local(pp=2), microbatches=4, cuts=[1, 1])
        pipe.step(vectors(4))
        pipe.step(vectors(4))
        return pipe.timeline()

    timeline = run_ranks(2, rank)[0]
    ideal = (4 + 1) * 0.06  # micro-batches and one more for the other rank
    assert ideal <= timeline.makespan < 4 * 2 * 0.06  # one rank after the other would take that long
    for busy in timeline.busy:
        assert busy >= 4 * 0.06


def test_the_microbatches_in_flight_are_read_off_the_schedule() -> None:
    assert in_flight(generate("1f1b", 4, 8)) == [4, 3, 2, 1]
    assert in_flight(generate("gpipe", 2, 5)) == [5, 5]
    assert all(kind in (Kind.F, Kind.B) for row in generate("1f1b", 2, 2).rows for kind in row.kinds)
