"""The whole engine over RCCL's stand-in: the numbers of one process in every schedule, and why orders are proved."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from pipert.comm.faults import Faults
from pipert.comm.local import run_ranks
from pipert.comm.mesh import Mesh
from pipert.comm.mixed import MixedTransport
from pipert.comm.rccl_library import Library
from pipert.comm.transport import Transport
from pipert.engine import programs
from pipert.engine.collect import collect
from pipert.engine.links import measure_links
from pipert.engine.pipeline import Pipeline
from pipert.optim.adamw import ZeroAdamW
from pipert.scheduler.action import Kind
from pipert.scheduler.errors import ScheduleError
from pipert.scheduler.program import Program
from pipert.scheduler.row import ActionRow
from tests.engine.world import (
    ADAMW,
    SGD,
    Outcome,
    assert_same,
    gpt,
    parts,
    run_pipeline,
    run_plain,
    token_loss,
    tokens,
    tower,
    vectors,
)

pytestmark = pytest.mark.usefixtures("rccl")

PAIR, DIRECTION = (
    lambda transport: MixedTransport.over(transport, "pair"),
    lambda transport: MixedTransport.over(transport, "direction"),
)
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 1)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule[0])
@pytest.mark.parametrize("microbatches", [1, 3, 8])
def test_every_schedule_has_the_bits_of_one_process(schedule: tuple[str, int], microbatches: int) -> None:
    model, steps = gpt(hidden=16, tied=False), [[tokens(microbatches, length=7, seed=s)] for s in range(2)]
    plain = [[parts(batch, microbatches) for batch in step] for step in steps]
    optimizer = SGD if microbatches % 2 else ADAMW
    mine = run_pipeline(
        model,
        token_loss,
        steps,
        4,
        optimizer=optimizer,
        world=PAIR if (microbatches + len(schedule[0])) % 2 else DIRECTION,
        schedule=schedule[0],
        chunks=schedule[1],
        microbatches=microbatches,
    )
    assert_same(mine, run_plain(model, token_loss, plain, optimizer=optimizer), 0)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule[0])
def test_any_number_of_micro_batches_has_the_bits_of_one_process(schedule: tuple[str, int]) -> None:
    model = tower(8)
    for microbatches in (2, 4, 5):
        steps = [[vectors(microbatches + 1, seed=seed)] for seed in range(2)]
        mine = run_pipeline(
            model,
            F.mse_loss,
            steps,
            4,
            optimizer=ADAMW if microbatches == 4 else SGD,
            world=DIRECTION if microbatches == 4 else PAIR,
            schedule=schedule[0],
            chunks=schedule[1],
            microbatches=microbatches,
        )
        plain = [[parts(batch, microbatches) for batch in step] for step in steps]
        assert_same(mine, run_plain(model, F.mse_loss, plain, optimizer=ADAMW if microbatches == 4 else SGD), 0)


@pytest.mark.parametrize("world", [PAIR, DIRECTION], ids=["pair", "direction"])
def test_replicas_and_tied_weights_are_summed_over_rccl(world: Any) -> None:
    model = gpt(layers=4, hidden=16, tied=True)
    steps = [[tokens(4, seed=2 * s), tokens(3, length=12, seed=2 * s + 1)] for s in range(3)]
    plain = [[parts(batch, 3) for batch in step] for step in steps]
    mine = run_pipeline(model, token_loss, steps, 2, 2, optimizer=ADAMW, world=world, microbatches=3)
    assert_same(mine, run_plain(model, token_loss, plain, optimizer=ADAMW))


def test_shapes_that_change_every_step_and_data_dependent_ones_pass() -> None:
    model = gpt(layers=5, hidden=16, sequence=20, tied=False)
    steps = [[[tokens(1 + (s + m) % 3, 7 + (3 * s + m) % 13, seed=s) for m in range(1 + s % 4)]] for s in range(4)]
    for dynamic, world in ((False, PAIR), (True, DIRECTION)):
        mine = run_pipeline(model, token_loss, steps, 5, optimizer=SGD, world=world, dynamic=dynamic)
        assert_same(mine, run_plain(model, token_loss, steps, optimizer=SGD), 0)


def test_random_sleeps_before_every_action_change_nothing() -> None:
    """Communicators are made before the first micro-batch, in one order: whoever is late, nobody waits for ever."""
    model, batch = tower(6), vectors(4)
    plain = {count: run_plain(model, F.mse_loss, [[parts(batch, count)]]) for count in (2, 3, 4)}

    def late(seed: int) -> Outcome:
        schedule, chunks = SCHEDULES[seed % 5]
        return run_pipeline(
            model,
            F.mse_loss,
            [[batch]],
            3,
            world=(PAIR, DIRECTION)[seed % 2],
            schedule=schedule,
            chunks=chunks,
            microbatches=2 + seed % 3,
            transport={"faults": Faults(seed=seed, stall=0.05)},
        )

    with ThreadPoolExecutor() as pool:  # they mostly sleep
        for seed, mine in enumerate(pool.map(late, range(20))):
            assert_same(mine, plain[2 + seed % 3], 0)


def test_no_communicator_is_made_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    for name in ("init", "split"):
        make = getattr(Library, name)
        monkeypatch.setattr(Library, name, lambda *given, make=make: (made.append(0), make(*given))[1])

    def rank(transport: Transport) -> tuple[int, int]:
        mesh = Mesh.from_transport(PAIR(transport), pp=2, dp=2)
        pipe = Pipeline(gpt(layers=4, hidden=16, tied=True), token_loss, mesh, microbatches=2)
        optim = ZeroAdamW(pipe, zero=2)
        transport.barrier()
        before = len(made)
        for samples in (2, 5):
            pipe.step(tokens(samples))
            optim.step()
        pipe.eval_step(tokens(3))
        transport.barrier()
        return before, len(made)

    (before, after), *_ = run_ranks(4, rank)
    assert before == after > 4 * 3


# ---- the proof matters ----------------------------------------------------------------------------------------------


def swapped(program: Program) -> Program:
    """Rank 1 posts its first two receives from rank 0 the other way round, as an option meant to help GPUs once did."""
    codes = program.rows[1].codes.copy()
    kinds = [action.kind for action in program.rows[1]]
    first, second = [place for place, kind in enumerate(kinds) if kind is Kind.RECV_F][:2]
    moved = codes[second]
    codes[first + 1 : second + 1] = codes[first:second].copy()
    codes[first] = moved
    return replace(program, rows=(program.rows[0], ActionRow.from_codes(codes)), groups=())


def train_swapped(world: Any) -> dict[str, Any]:
    model, batch = tower(4), vectors(8)

    def rank(transport: Transport) -> dict[str, Any]:
        mesh = Mesh.from_transport(world(transport), pp=2)
        pipe = Pipeline(copy.deepcopy(model), F.mse_loss, mesh, schedule="gpipe", microbatches=4)
        for _ in range(2):  # in the second one all sizes are known
            pipe.step(batch)
        return {name: parameter.grad for name, parameter in pipe.named_parameters()}

    first, second = run_ranks(2, rank)
    return {**first, **second}


def test_a_swap_of_equal_shapes_is_refused_and_forced_through_it_is_silently_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = run_plain(tower(4), F.mse_loss, [[parts(vectors(8), 4)]] * 2).gradients
    lower, verify = programs.lower, programs.verify

    def lower_swapped(*arguments: Any, **options: Any) -> Program:
        program = lower(*arguments, **options)
        return program if options["meta"] else swapped(program)

    assert all(torch.equal(gradient, right[name]) for name, gradient in train_swapped(DIRECTION).items())
    monkeypatch.setattr(programs, "lower", lower_swapped)
    for world, name in ((DIRECTION, "direction"), (PAIR, "pair")):
        with pytest.raises(ScheduleError, match=rf"swap at rank 1, .*rccl-{name} matches by order"):
            train_swapped(world)
    monkeypatch.setattr(programs, "verify", lambda program: replace(verify(program), faults=()))
    wrong = train_swapped(DIRECTION)
    assert not all(torch.equal(gradient, right[name]) for name, gradient in wrong.items())
    assert all(torch.isfinite(gradient).all() for gradient in wrong.values())
    matched_by_tag = train_swapped(lambda transport: transport)
    assert all(torch.equal(gradient, right[name]) for name, gradient in matched_by_tag.items())


def test_exchanges_travel_in_groups() -> None:
    opened: list[int] = []

    def rank(transport: Transport) -> int:
        world = MixedTransport.over(transport, "pair")
        mesh = Mesh.from_transport(world, pp=2)
        pipe = Pipeline(tower(4), F.mse_loss, mesh, schedule="1f1b", microbatches=4)
        pipe.step(vectors(8))
        group = mesh.pp_group.group
        mesh.pp_group.group = lambda: (opened.append(mesh.rank), group())[1]
        pipe.step(vectors(8))  # all sizes are known: this is the program that is proved before any step
        program = pipe.proof.target
        assert isinstance(program, Program)
        return len(program.spans(mesh.pp_rank))

    spans = run_ranks(2, rank)
    assert [opened.count(rank) for rank in (0, 1)] == spans and max(spans) > 0


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_shards_of_replicas_are_exchanged_over_rccl(zero: int) -> None:
    model = gpt(layers=4, hidden=16, tied=True)
    steps = [[tokens(4, seed=2 * s), tokens(4, seed=2 * s + 1)] for s in range(2)]

    def rank(transport: Transport) -> dict[str, Any]:
        mesh = Mesh.from_transport(PAIR(transport), pp=2, dp=2)
        pipe = Pipeline(copy.deepcopy(model), token_loss, mesh, schedule="1f1b", microbatches=2)
        optim = ZeroAdamW(pipe, zero=zero, lr=0.01, weight_decay=0.01)
        for step in steps:
            pipe.step(step[mesh.dp_rank])
            optim.step()
            optim.zero_grad()
        with optim.gathered():
            weights = {name: parameter.detach().clone() for name, parameter in pipe.named_parameters()}
        mesh.close()
        return weights

    plain = [[parts(batch, 2) for batch in step] for step in steps]
    wanted = run_plain(model, token_loss, plain, optimizer=ADAMW).weights
    for weights in run_ranks(4, rank):
        for name, weight in weights.items():
            torch.testing.assert_close(weight, wanted[name], rtol=1e-10, atol=1e-10)


def test_links_are_measured_and_tensors_collected_over_the_mixture() -> None:
    def rank(transport: Transport) -> Any:
        mesh = Mesh.from_transport(PAIR(transport), pp=3)
        links = measure_links(mesh.pp_group, 4096, torch.device("cpu"))
        found = collect({"x": torch.full((2, 3), float(mesh.rank)).t()}, mesh.pp_group)
        mesh.close()
        return len(links), {owner: float(tensor[0, 0]) for owner, tensor in found.get("x", {}).items()}

    assert run_ranks(3, rank) == [(3, {0: 0, 1: 1, 2: 2}), (3, {}), (3, {})]
