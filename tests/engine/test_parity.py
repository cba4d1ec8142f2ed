"""The numbers of a pipeline are those of one process, whatever the layout."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from pipert.comm.faults import Faults
from pipert.comm.local import run_ranks
from pipert.comm.mesh import Mesh
from pipert.engine.pipeline import Pipeline
from pipert.scheduler.action import Action, Kind
from pipert.scheduler.placement import Placement
from pipert.scheduler.schedule import Schedule
from tests.engine.world import (
    ADAMW,
    SCHEDULES,
    SGD,
    Outcome,
    assert_same,
    gpt,
    merge,
    parts,
    run_pipeline,
    run_plain,
    tie_and_freeze,
    token_loss,
    tokens,
    tower,
    vectors,
)


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5, 8])
def test_every_schedule_takes_every_number_of_microbatches(schedule: str, chunks: int, microbatches: int) -> None:
    batch = vectors(8)
    model = tower(8, dtype=torch.float32)
    batch = (batch[0].float(), batch[1].float())
    mine = run_pipeline(model, F.mse_loss, [[batch]], 4, schedule=schedule, chunks=chunks, microbatches=microbatches)
    assert_same(mine, run_plain(model, F.mse_loss, [[parts(batch, microbatches)]]), 0)


@pytest.mark.parametrize("microbatches", range(1, 13))
def test_interleaved_takes_microbatches_that_do_not_divide(microbatches: int) -> None:
    batch = vectors(12)
    model = tower(8)
    mine = run_pipeline(model, F.mse_loss, [[batch]], 4, schedule="interleaved", chunks=2, microbatches=microbatches)
    assert_same(mine, run_plain(model, F.mse_loss, [[parts(batch, microbatches)]]), 0)


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_a_gpt_with_tied_weights_trains_as_in_one_process(schedule: str, chunks: int, optimizer: Any) -> None:
    model = gpt(tied=True)
    batches = [tokens(4, seed=step) for step in range(3)]
    mine = run_pipeline(
        model,
        token_loss,
        [[batch] for batch in batches],
        4,
        optimizer=optimizer,
        schedule=schedule,
        chunks=chunks,
        microbatches=4,
    )
    assert_same(mine, run_plain(model, token_loss, [[parts(b, 4)] for b in batches], optimizer=optimizer))


@pytest.mark.parametrize("tied", [False, True])
def test_replicas_agree_with_one_process(tied: bool) -> None:
    model = gpt(tied=tied, layers=3)
    steps = [[tokens(4, seed=2 * step), tokens(3, length=12, seed=2 * step + 1)] for step in range(3)]
    mine = run_pipeline(model, token_loss, steps, 2, 2, optimizer=ADAMW, microbatches=2)
    plain = [[parts(batch, 2) for batch in step] for step in steps]
    assert_same(mine, run_plain(model, token_loss, plain, optimizer=ADAMW))


def down_and_up(ranks: int, microbatches: int) -> Schedule:
    """Stages down the ranks and up again; one micro-batch after another."""
    placement = Placement.v(ranks)
    stages = range(placement.num_stages)
    order = [
        action
        for m in range(microbatches)
        for action in (*(Action(s, Kind.F, m) for s in stages), *(Action(s, Kind.B, m) for s in reversed(stages)))
    ]
    rows = ([action for action in order if placement.owners[action.stage] == rank] for rank in range(ranks))
    return Schedule.of("down and up", placement, microbatches, rows)


def test_stages_that_go_down_and_up_hand_over_on_their_rank_without_a_message() -> None:
    model, batch = gpt(tied=True, layers=6), tokens(4)
    copies = [copy.deepcopy(model) for _ in range(4)]

    def rank(transport: Any) -> tuple[Outcome, int, int]:
        pipe = Pipeline(copies[transport.rank], token_loss, Mesh.local(pp=4), schedule=down_and_up, microbatches=2)
        pipe.step(batch if transport.rank == 0 else None)  # rank 0 has the first stage and the loss
        before = pipe.mesh.pp_group.counters.messages["send"]  # type: ignore[attr-defined]
        outcome = Outcome([pipe.step(batch if transport.rank == 0 else None)])
        sent = pipe.mesh.pp_group.counters.messages["send"] - before  # type: ignore[attr-defined]
        outcome.gradients = {name: p.grad for name, p in pipe.named_parameters()}
        return outcome, sent, len(list(pipe.parameters()))

    found = run_ranks(4, rank)
    assert [sent for _, sent, _ in found] == [2 * 2, 4 * 2, 4 * 2, 2 * 2]
    mine = merge([outcome for outcome, _, _ in found])
    plain = run_plain(model, token_loss, [[parts(batch, 2)]] * 2)
    assert mine.results[0].loss == pytest.approx(plain.results[0].loss, rel=1e-12)
    for name, gradient in plain.gradients.items():
        assert gradient is not None
        torch.testing.assert_close(mine.gradients[name], gradient, rtol=1e-10, atol=1e-12)


@st.composite
def worlds(draw: st.DrawFn) -> dict[str, Any]:
    """A layout, a model, data and a transport."""
    schedule, chunks = draw(st.sampled_from(SCHEDULES))
    pp, dp = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (1, 3), (3, 2)]))
    stages = pp * chunks
    steps = draw(st.integers(1, 2))
    sizes = st.lists(st.integers(1, 4), min_size=1, max_size=5)
    return {
        "schedule": schedule,
        "chunks": chunks,
        "pp": pp,
        "dp": dp,
        "blocks": draw(st.integers(stages, stages + 4)),
        "sizes": [[draw(sizes) for _ in range(dp)] for _ in range(steps)],
        "recompute": draw(st.sampled_from(["none", "block", "full"])),
        "tied": draw(st.sets(st.integers(0, 5), max_size=3)),
        "frozen": draw(st.sets(st.integers(0, stages + 3))),
        "dynamic": draw(st.booleans()),
        "optimizer": draw(st.sampled_from([None, SGD, ADAMW])),
        "transport": {
            "buffered": draw(st.booleans()),
            "blocking": draw(st.booleans()),
            "matching": draw(st.sampled_from(["tag", "order"])),
            "channel": draw(st.sampled_from(["message", "pair", "direction", "rank"])),
            "grouped": draw(st.booleans()),
            "tag_bound": draw(st.sampled_from([32768, 7])),
            "faults": draw(st.sampled_from([None, Faults(seed=1, delay=3.0, reorder=True), Faults(seed=2, delay=0.5)])),
        },
    }


@settings(max_examples=60)
@given(worlds())
def test_any_layout_on_any_transport_gives_the_numbers_of_one_process(world: dict[str, Any]) -> None:
    model = tower(world["blocks"])
    tie_and_freeze(model, world["tied"], world["frozen"])
    steps, seed = [], 0
    for sizes in world["sizes"]:
        replicas = []
        for own in sizes:
            seed += 1
            replicas.append([vectors(size, seed=100 * seed + i) for i, size in enumerate(own)])
        steps.append(replicas)
    mine = run_pipeline(
        model,
        F.mse_loss,
        steps,
        world["pp"],
        world["dp"],
        optimizer=world["optimizer"],
        transport=world["transport"],
        **{key: world[key] for key in ("schedule", "chunks", "recompute", "dynamic")},
    )
    bitwise = world["dp"] == 1 and len(world["tied"]) < 2
    assert_same(mine, run_plain(model, F.mse_loss, steps, optimizer=world["optimizer"]), 0 if bitwise else 1e-10)
