"""A searched schedule: the numbers of one process, within the memory that there is, the same on every rank."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipert.comm.local import run_ranks
from pipert.comm.mesh import Mesh
from pipert.engine import auto
from pipert.engine.auto import AutoOptions
from pipert.engine.balance import balanced_counts, tilted_counts
from pipert.engine.links import measure_links
from pipert.engine.pipeline import Pipeline
from pipert.errors import ConfigError
from pipert.graph.model_graph import Block, ModelGraph
from pipert.partition.partition import Partition
from pipert.partition.solve import partition_graph
from pipert.scheduler.costs import Costs
from pipert.scheduler.formats.text import dumps, loads
from pipert.scheduler.generators.registry import generate
from pipert.scheduler.placement import Placement
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.search import search
from pipert.scheduler.simulate import simulate
from tests.engine.test_zero_bubble import zoo
from tests.engine.world import (
    ADAMW,
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

HEAVY_END = Costs((1, 1, 3), (2, 2, 6), (0, 1, 3), (2, 1, 3), comm=0.1)


def lopsided() -> nn.Sequential:
    """Blocks of very unequal weight, the heaviest last."""
    with seeded(0):
        head = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 6))
        return nn.Sequential(nn.LayerNorm(6), *tower(5).children(), head).double()


def on_ranks(pp: int, work: Any, model: nn.Module | None = None, **options: Any) -> list[Any]:
    """Call ``work(pipe)`` on every rank of a pipeline with a searched schedule."""
    settings: dict[str, Any] = {"schedule": "auto", "microbatches": 4, **options}

    def rank(transport: Any) -> Any:
        return work(Pipeline(model or lopsided(), F.mse_loss, Mesh.local(pp=pp), **settings))

    return run_ranks(pp, rank)


@pytest.mark.parametrize("example", [False, True], ids=["estimated", "measured"])
@pytest.mark.parametrize(("pp", "microbatches"), [(1, 3), (2, 4), (3, 5), (4, 1)])
def test_unequal_stages_have_the_bits_of_one_process(pp: int, microbatches: int, example: bool) -> None:
    model, steps = lopsided(), [vectors(5, seed=step) for step in range(2)]
    options: dict[str, Any] = {"schedule": "auto", "microbatches": microbatches, "optimizer": ADAMW}
    options["example"] = vectors(1)[0] if example else None
    mine = run_pipeline(model, F.mse_loss, [[batch] for batch in steps], pp, **options)
    plain = [[parts(batch, microbatches)] for batch in steps]
    assert_same(mine, run_plain(model, F.mse_loss, plain, optimizer=ADAMW), 0)


@pytest.mark.parametrize("recompute", ["none", "block", "full"])
def test_a_tied_gpt_trains_as_in_one_process(recompute: str) -> None:
    model, batch = gpt(tied=True, layers=4), tokens(4)
    options: dict[str, Any] = {"schedule": "auto", "microbatches": 4, "recompute": recompute, "example": batch[0][:1]}
    mine = run_pipeline(model, token_loss, [[batch]], 2, **options)
    assert_same(mine, run_plain(model, token_loss, [[parts(batch, 4)]]))


def test_any_module_has_its_gradients_also_where_halves_are_mixed_with_whole_backwards() -> None:
    model, batch = zoo().double().eval(), vectors(6)
    mine = run_pipeline(model, F.mse_loss, [[batch], [batch]], 3, schedule="auto", microbatches=3)
    frozen = run_pipeline(model, F.mse_loss, [[batch], [batch]], 3, schedule="1f1b", microbatches=3)
    assert_same(mine, frozen, 0)


def test_replicas_and_ranks_follow_the_same_schedule() -> None:
    model, batches = lopsided(), [vectors(4, seed=0), vectors(3, seed=1)]
    seen: list[str] = []
    mine = run_pipeline(
        model, F.mse_loss, [batches], 2, 2, schedule="auto", microbatches=4, example=vectors(1)[0],
        before=lambda pipe: seen.append(dumps(pipe.found.schedule)),
    )  # fmt: skip
    assert len(seen) == 4 and len(set(seen)) == 1
    assert_same(mine, run_plain(model, F.mse_loss, [[parts(batch, 4) for batch in batches]]))


def test_the_schedule_for_a_heavy_last_stage_is_at_least_as_fast_as_the_known_ones() -> None:
    options: dict[str, Any] = {"microbatches": 6, "auto": AutoOptions(costs=HEAVY_END)}
    found, table = on_ranks(3, lambda pipe: (pipe.found, pipe.table()), **options)[0]
    assert found.schedule.placement == Placement.linear(3)
    for name in ("1f1b", "zb-h1"):
        assert simulate(found.schedule, HEAVY_END).makespan <= simulate(generate(name, 3, 6), HEAVY_END).makespan
    assert found.makespan >= found.bound and str(found) in table


@pytest.mark.parametrize("in_flight", [1, 2, (3, 2, 1)])
def test_no_rank_keeps_more_than_its_limit(in_flight: Any) -> None:
    def peaks(pipe: Pipeline) -> tuple[int, ...]:
        pipe.step(vectors(6))
        return pipe.timeline().peaks

    allowed = in_flight if isinstance(in_flight, tuple) else (in_flight,) * 3
    for placements, stages in ((("flat",), 1), (("v",), 2)):
        options = AutoOptions(in_flight=in_flight, placements=placements)  # type: ignore[arg-type]
        measured = on_ranks(3, peaks, microbatches=6, auto=options)[0]
        assert all(peak <= stages * limit for peak, limit in zip(measured, allowed, strict=True))


@pytest.mark.parametrize("pp", [1, 2])
def test_one_rank_searches_for_all_also_where_there_is_one_placement(pp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []

    def counted(costs: Costs, ranks: int, microbatches: int, **options: Any) -> Any:
        searched.append(microbatches)
        return search(costs, ranks, microbatches, **options)

    monkeypatch.setattr(auto, "search", counted)
    on_ranks(pp, lambda pipe: pipe.found, auto=AutoOptions(placements=("flat",)))
    assert searched == [4]


def test_bytes_limit_what_is_kept_and_too_few_are_refused_on_every_rank() -> None:
    def kept(pipe: Pipeline) -> tuple[list[int], list[int], tuple[int, ...]]:
        pipe.step(vectors(8))
        stages = pipe.partition.stages
        weights = [4 * stage.parameter_bytes for stage in stages]
        return weights, [stage.activation_bytes or 0 for stage in stages], pipe.timeline().peaks

    options: dict[str, Any] = {"microbatches": 8, "example": vectors(1)[0], "cuts": [4, 3]}
    flat: Any = {"placements": ("flat",)}
    weights, sizes, _ = on_ranks(2, kept, **options, auto=AutoOptions(**flat))[0]
    for fits in (1, 3):
        memory = [weight + fits * size + size // 2 for weight, size in zip(weights, sizes, strict=True)]
        _, _, peaks = on_ranks(2, kept, **options, auto=AutoOptions(**flat, memory=memory))[0]
        assert max(peaks) == fits
    with pytest.raises(ConfigError, match=r"memory = 64 bytes on rank 0, but its parameters take .* allow more"):
        on_ranks(2, kept, **options, auto=AutoOptions(memory=64))
    with pytest.raises(ConfigError, match="pass example= to Pipeline"):
        on_ranks(2, kept, auto=AutoOptions(memory=1 << 20))


@pytest.mark.parametrize("placement", [Placement.v(2), Placement.looped(2, 2), Placement.v(3)], ids=str)
def test_blocks_are_cut_so_that_ranks_have_equal_work(placement: Placement) -> None:
    costs = [0.1, *[1.0] * 9, 1.0]  # any two stages of three blocks make the heaviest stage as light as can be
    graph = ModelGraph.chain(Block(str(n), forward=cost, backward=cost) for n, cost in enumerate(costs))
    before = partition_graph(graph, placement.num_stages)
    counts = balanced_counts(graph, before, placement)

    def busiest(partition: Partition) -> float:
        load = [0.0] * placement.num_ranks
        for owner, stage in zip(placement.owners, partition.stages, strict=True):
            load[owner] += stage.cost
        return max(load)

    after = busiest(partition_graph(graph, placement.num_stages, cuts=counts))
    assert after <= busiest(before) and sum(counts) == len(costs) and min(counts) >= 1
    least = min(
        busiest(partition_graph(graph, placement.num_stages, cuts=tuple(b - a for a, b in pairwise((0, *cut, 11)))))
        for cut in combinations(range(1, 11), placement.num_stages - 1)
    )
    assert after == pytest.approx(least)


def test_other_cuts_make_first_stages_shorter_and_last_ones_longer() -> None:
    graph = ModelGraph.chain(Block(str(n), forward=1.0, backward=2.0) for n in range(9))

    def counts(placement: Placement, cuts: tuple[int, ...]) -> list[tuple[int, ...]]:
        return list(tilted_counts(partition_graph(graph, placement.num_stages, cuts=cuts), placement))

    assert counts(Placement.v(2), (3, 2, 2, 2)) == [(2, 2, 2, 3), (2, 1, 3, 3), (1, 2, 2, 4)]
    assert counts(Placement.looped(2, 2), (2, 2, 3, 2)) == [(1, 2, 4, 2), (1, 1, 4, 3)]
    assert counts(Placement.linear(2), (4, 5)) == []


def test_the_first_stage_is_shorter_where_memory_makes_that_faster() -> None:
    """The second rank waits for one block in place of two, while activations of the first stage pile up."""
    equal = nn.Sequential(*(nn.Linear(6, 6) for _ in range(8)))

    def counts(in_flight: int) -> tuple[int, ...]:
        options = AutoOptions(in_flight=in_flight, placements=("v",))
        found: tuple[int, ...] = on_ranks(2, lambda pipe: pipe.partition.counts, equal, auto=options)[0]
        return found

    assert counts(2) == (2, 2, 2, 2)
    assert counts(4)[0] == 1 and sum(counts(4)) == 8


def test_other_numbers_of_microbatches_train_and_evaluate() -> None:
    model, few, many = lopsided(), vectors(3, seed=1), vectors(7, seed=2)

    def work(pipe: Pipeline) -> tuple[list[float], dict[str, Any], int]:
        losses = [pipe.eval_step(many, microbatches=7).loss, pipe.step(few).loss, pipe.eval_step(few).loss]
        searched = len(pipe._programs.plan.found)  # type: ignore[union-attr]
        return losses, {name: p.grad for name, p in pipe.named_parameters()}, searched

    ranks = on_ranks(2, work, model)
    reference = run_plain(model, F.mse_loss, [[parts(few, 3)]])
    for losses, gradients, searched in ranks:
        assert losses[1] == losses[2] == reference.results[0].loss
        assert losses[0] == pytest.approx(F.mse_loss(model(many[0]), many[1]).item())
        assert searched == 2  # an evaluation is worth no search
        assert all(torch.equal(grad, reference.gradients[name]) for name, grad in gradients.items())  # type: ignore[arg-type]


@pytest.mark.parametrize("first", ["auto", "1f1b", "zb-v"])
def test_a_schedule_for_measured_times_takes_over_and_can_be_given_to_another_run(first: str) -> None:
    model, batch = lopsided(), vectors(4)

    def work(pipe: Pipeline) -> tuple[str, tuple[int, ...], Costs, list[float], dict[str, Any]]:
        with pytest.raises(ConfigError, match="before the first step"):
            pipe.replan()
        losses = [pipe.step(batch).loss]
        costs = pipe.measured_costs()
        found = pipe.replan()
        assert found is pipe.found and pipe.proof.target.schedule.name == "auto"  # type: ignore[union-attr]
        losses.append(pipe.step(batch).loss)
        gradients = {name: p.grad for name, p in pipe.named_parameters()}
        return dumps(found.schedule), pipe.partition.counts, costs, losses, gradients

    ranks = on_ranks(2, work, model, schedule=first)
    text, counts, costs, _, _ = ranks[0]
    assert len({rank[0] for rank in ranks}) == 1
    assert costs.stages == len(counts) and all(seconds > 0 for seconds in costs.forward)  # type: ignore[union-attr]
    twice = run_plain(model, F.mse_loss, [[parts(batch, 4)]] * 2)
    for _, _, _, losses, gradients in ranks:
        assert losses == [result.loss for result in twice.results]
        assert all(torch.equal(grad, twice.gradients[name]) for name, grad in gradients.items())
    schedule = loads(text)
    assert isinstance(schedule, Schedule)
    other = run_pipeline(model, F.mse_loss, [[batch]], 2, schedule=schedule, microbatches=4, cuts=counts)
    assert_same(other, run_plain(model, F.mse_loss, [[parts(batch, 4)]]), 0)


def test_costs_of_another_run_say_how_many_stages_there_are() -> None:
    costs = Costs((1, 2, 1, 2), (2, 4, 2, 4), (0, 2, 1, 2), (2, 2, 1, 2))
    found = on_ranks(2, lambda pipe: pipe.found, auto=AutoOptions(costs=costs))[0]
    assert found.schedule.num_stages == 4


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"auto": AutoOptions(), "schedule": "1f1b"}, 'goes with schedule = "auto"'),
        ({"auto": AutoOptions(in_flight=0)}, r"in_flight = 0 for 2 ranks; give one integer >= 1"),
        ({"auto": AutoOptions(in_flight=(1, 2, 3))}, r"in_flight = \(1, 2, 3\) for 2 ranks"),
        ({"auto": AutoOptions(placements=("flat",)), "chunks": 2}, "use other chunks, placements, cuts or costs"),
        ({"cuts": [1, 2, 4]}, "has none with 3 stages"),
    ],
)
def test_what_cannot_be_searched_is_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        on_ranks(2, lambda pipe: None, **options)


def test_unknown_placements_are_refused() -> None:
    with pytest.raises(ConfigError, match="name at least one of"):
        AutoOptions(placements=("w",))  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_links_are_measured_between_neighbours(ranks: int) -> None:
    answers = run_ranks(ranks, lambda transport: measure_links(transport, 1 << 16, torch.device("cpu")))
    assert all(answer == answers[0] for answer in answers)
    assert len(answers[0]) == ranks
    if ranks > 1:
        assert all(link.seconds(1 << 16) > 0 for link in answers[0])
