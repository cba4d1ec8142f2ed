"""Schedules whose backwards run in two halves: the numbers of one process, and the memory that they promise."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipert.comm.local import run_ranks
from pipert.comm.mesh import Mesh
from pipert.engine.pipeline import Pipeline
from pipert.engine.reference import reference_step
from pipert.scheduler.action import Action, Kind
from pipert.scheduler.costs import Costs
from pipert.scheduler.generators.registry import GENERATORS
from pipert.scheduler.placement import Placement
from pipert.scheduler.program import Program
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.simulate import simulate
from pipert.scheduler.timeline import Timeline
from tests.engine.test_memory import Watch, Watched
from tests.engine.world import (
    ADAMW,
    SGD,
    Outcome,
    assert_same,
    gpt,
    parts,
    run_pipeline,
    run_plain,
    seeded,
    token_loss,
    tokens,
    tower,
    vectors,
)

SPLIT = ["zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dual-pipe-v"]


def chunks_for(schedule: str) -> dict[str, int]:
    """Schedules in a V know how many stages they put on a rank."""
    return {"chunks": 2} if GENERATORS[schedule].chunked else {}


def sampled(seed: int, count: int) -> list[tuple[str, int, int, torch.dtype, str]]:
    """Some layouts of every schedule: name, ranks, micro-batches, dtype, optimizer."""
    choose = random.Random(seed)
    every = [(pp, m) for pp in (1, 2, 3, 4) for m in (1, 2, 3, 4, 5, 8)]
    kinds = [(dtype, optimizer) for dtype in (torch.float32, torch.float64) for optimizer in ("sgd", "adamw")]
    return [
        (name, pp, m, *kind)
        for name in GENERATORS
        for (pp, m), kind in zip(choose.sample(every, count), kinds * count, strict=False)
    ]


@pytest.mark.parametrize(("schedule", "pp", "microbatches", "dtype", "optimizer"), sampled(0, 4), ids=str)
def test_every_schedule_has_the_bits_of_one_process_after_three_steps(
    schedule: str, pp: int, microbatches: int, dtype: torch.dtype, optimizer: str
) -> None:
    model = tower(2 * pp + 1, dtype=dtype)
    steps = [[(x.to(dtype), y.to(dtype))] for x, y in (vectors(8, seed=seed) for seed in range(3))]
    options: dict[str, Any] = {"schedule": schedule, "microbatches": microbatches, **chunks_for(schedule)}
    options["optimizer"] = {"sgd": SGD, "adamw": ADAMW}[optimizer]
    mine = run_pipeline(model, F.mse_loss, steps, pp, **options)
    plain = [[parts(batch, microbatches) for batch in step] for step in steps]
    assert_same(mine, run_plain(model, F.mse_loss, plain, optimizer=options["optimizer"]), 0)


@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("schedule", SPLIT)
def test_a_gpt_trains_as_in_one_process(schedule: str, optimizer: Any) -> None:
    model = gpt(tied=schedule in ("zb-h1", "zb-v"))
    batches = [tokens(5, seed=step) for step in range(3)]
    options: dict[str, Any] = {"schedule": schedule, "microbatches": 5}
    mine = run_pipeline(model, token_loss, [[batch] for batch in batches], 3, optimizer=optimizer, **options)
    assert_same(mine, run_plain(model, token_loss, [[parts(b, 5)] for b in batches], optimizer=optimizer))


def test_a_written_schedule_may_put_all_weight_gradients_last_and_mix_in_whole_backwards() -> None:
    texts = ["0F0 0F1 0F2 0I0 0I1 0B2 0W0 0W1", "1F0 1I0 1F1 1I1 1F2 1B2 1W0 1W1"]
    rows = [[Action.parse(text) for text in row.split()] for row in texts]
    schedule = Schedule.of("late", Placement.linear(2), 3, rows)
    model, batch = tower(4), vectors(6)
    mine = run_pipeline(model, F.mse_loss, [[batch]], 2, schedule=schedule, microbatches=3)
    assert_same(mine, run_plain(model, F.mse_loss, [[parts(batch, 3)]]))


@pytest.mark.parametrize("schedule", ["zb-h1", "dual-pipe-v"])
def test_replicas_are_summed_after_the_last_weight_gradient(schedule: str) -> None:
    model = tower(5)
    steps = [[vectors(4, seed=2 * step), vectors(3, seed=2 * step + 1)] for step in range(2)]
    mine = run_pipeline(model, F.mse_loss, steps, 2, 2, optimizer=SGD, schedule=schedule, microbatches=3)
    plain = [[parts(batch, 3) for batch in step] for step in steps]
    assert_same(mine, run_plain(model, F.mse_loss, plain, optimizer=SGD))


class Twice(nn.Module):
    """One linear layer used twice, in place of which autograd sees one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(torch.tanh(self.linear(x)))


class Raw(nn.Module):
    """Parameters used in functions; one of them is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.shift = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6))
        self.unused = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x @ self.matrix.sin(), self.matrix) + self.shift


class Convolution(nn.Module):
    """A convolution over the features, and norms."""

    def __init__(self) -> None:
        super().__init__()
        self.filter, self.norm, self.batch_norm = nn.Conv1d(1, 2, 3, padding=1), nn.LayerNorm(6), nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.batch_norm(self.norm(self.filter(x[:, None]).mean(1)))


class Lookup(nn.Module):
    """An embedding whose weight is that of a linear layer of the same stage; random numbers too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(6, 6), nn.Linear(6, 6, bias=False)
        self.head.weight = self.table.weight
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(x + self.table(x.detach().argmax(-1))))


class Adapted(nn.Module):
    """A frozen layer with trainable low-rank matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Several(nn.Module):
    """Hands over several tensors, some of which nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.linear(x)
        return {"x": x, "parts": (y, y * 2), "unused": self.linear(x * 3), "ids": torch.arange(3)}


class Joined(nn.Module):
    """Takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value: dict[str, Any]) -> torch.Tensor:
        return self.linear(value["parts"][0]) + value["x"] * value["parts"][1]


def zoo() -> nn.Sequential:
    with seeded(0):
        kinds = [nn.Linear(6, 6), Twice(), Raw(), Lookup(), Convolution(), Several(), Joined(), Adapted(), Twice()]
        return nn.Sequential(*kinds, nn.Linear(6, 6).requires_grad_(False))


def reference(model: nn.Module, batch: Any, microbatches: int) -> Outcome:
    outcome = Outcome([reference_step(model, F.mse_loss, batch, microbatches, seed=5)])
    outcome.gradients = {name: p.grad for name, p in model.named_parameters()}
    outcome.weights = {name: p.detach() for name, p in model.named_parameters()}
    return outcome


@pytest.mark.parametrize("recompute", ["none", "block", "full"])
@pytest.mark.parametrize(("schedule", "pp"), [("zb-h1", 2), ("zb-h1", 4), ("zb-v", 2), ("v-min", 4), ("zb-h2", 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_zoo_of_modules_has_the_bits_of_one_process(
    schedule: str, pp: int, recompute: str, dtype: torch.dtype
) -> None:
    model = zoo().to(dtype)
    x, y = vectors(7)
    batch = (x.to(dtype), y.to(dtype))
    options: dict[str, Any] = {"schedule": schedule, "microbatches": 3, "recompute": recompute, "seed": 5}
    mine = run_pipeline(model, F.mse_loss, [[batch]], pp, **options)
    mine.norms = []
    assert_same(mine, reference(model, batch, 3), 0)


def test_stages_below_the_first_trainable_one_have_no_halves() -> None:
    model = tower(6)
    for block in model[:3]:
        block.requires_grad_(False)
    batch = vectors(4)
    mine = run_pipeline(model, F.mse_loss, [[batch]], 3, schedule="zb-h1", microbatches=4)
    assert_same(mine, run_plain(model, F.mse_loss, [[parts(batch, 4)]]), 0)


def test_a_microbatch_that_counts_nothing_adds_nothing() -> None:
    model, (ids, targets) = gpt(tied=False, layers=2), tokens(3)
    targets[1] = -100
    mine = run_pipeline(model, token_loss, [[(ids, targets)]], 2, schedule="zb-h1", microbatches=3)
    assert_same(mine, run_plain(model, token_loss, [[parts((ids, targets), 3)]]), 0)


@pytest.mark.parametrize(("schedule", "pp"), [("zb-h1", 3), ("zb-h2", 3), ("zb-v", 2), ("v-min", 2)])
def test_activations_are_free_after_the_first_half_and_as_many_live_as_simulated(schedule: str, pp: int) -> None:
    stages = pp * GENERATORS[schedule].stages
    watches = [Watch() for _ in range(stages)]

    def rank(transport: Any) -> tuple[Timeline, list[int]]:
        model = nn.Sequential(*(Watched(watches[i], "activation") for i in range(stages))).double()
        pipe = Pipeline(model, F.mse_loss, Mesh.local(pp=pp), schedule=schedule, microbatches=6)
        pipe.step(vectors(6))
        assert pipe.timeline().peaks == tuple(lane_peak(row) for row in pipe.proof.target.rows)  # type: ignore[union-attr]
        return pipe.timeline(), [watch.left for watch in watches]

    timeline, left = run_ranks(pp, rank)[0]
    assert not any(left)
    for stage in range(1, stages):  # the first one has one half only
        order = [action.kind for _, action, _, _ in timeline if action.stage == stage]
        assert watches[stage].peak == peak(order, Kind.I)


class _Note(torch.autograd.Function):
    """Watches the gradient that goes into what was called before."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, watch: Watch) -> torch.Tensor:
        ctx.watch = watch
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        noted = gradient * 1
        ctx.watch.add(noted)
        return noted, None


class Noted(nn.Module):
    """A linear layer whose output's gradients are watched."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.linear, self.watch = nn.Linear(6, 6), watch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noted: torch.Tensor = _Note.apply(self.linear(x), self.watch)  # type: ignore[no-untyped-call]
        return noted


@pytest.mark.parametrize(("schedule", "pp"), [("zb-h1", 3), ("zb-h2", 3), ("zb-v", 2), ("v-min", 2), ("auto", 3)])
def test_as_many_products_wait_for_their_second_half_as_simulated(schedule: str, pp: int) -> None:
    stages = 2 * pp
    watches = [Watch() for _ in range(stages)]

    def rank(transport: Any) -> tuple[Program, Timeline]:
        model = nn.Sequential(*(Noted(watch) for watch in watches)).double()
        pipe = Pipeline(model, F.mse_loss, Mesh.local(pp=pp), schedule=schedule, microbatches=6)
        pipe.step(vectors(6))
        program = pipe.proof.target
        assert isinstance(program, Program)
        assert not any(watch.left for watch in watches)
        return program, pipe.timeline()

    program, measured = run_ranks(pp, rank)[0]
    simulated = simulate(program, Costs(1, 2))
    assert measured.peaks == simulated.peaks
    for stage in range(1, program.num_stages):
        own = range(stages // program.num_stages * stage, stages // program.num_stages * (stage + 1))
        order = [action.kind for _, action, _, _ in simulated if action.stage == stage]
        waiting = peak([Kind.F if kind is Kind.I else kind for kind in order if kind is not Kind.F], Kind.W)
        assert {watches[block].peak for block in own} == {max(1, waiting)}  # a whole backward has one at a time


def lane_peak(row: Any) -> int:
    return peak([action.kind for action in row], Kind.W, Kind.B)


def peak(kinds: list[Kind], *ends: Kind) -> int:
    """The most micro-batches between their forward and an end."""
    now = most = 0
    for kind in kinds:
        now += (kind is Kind.F) - (kind in ends)
        most = max(most, now)
    return most


def test_the_timeline_has_both_halves_and_weight_gradients_come_second() -> None:
    model = tower(4)

    def rank(transport: Any) -> Timeline:
        pipe = Pipeline(model, F.mse_loss, Mesh.local(pp=2), schedule="zb-h1", microbatches=3)
        pipe.step(vectors(3))
        return pipe.timeline()

    timeline = run_ranks(2, rank)[0]
    times = {action: (start, end) for _, action, start, end in timeline}
    halves = [action for action in times if action.kind is Kind.W]
    assert len(halves) == 2 * 3
    for action in halves:
        assert times[action][0] >= times[action._replace(kind=Kind.I)][1]
