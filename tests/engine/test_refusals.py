"""What cannot be run is refused on every rank alike, before the first message, with values, rule and remedy."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipert.comm.local import run_ranks
from pipert.comm.mesh import Mesh
from pipert.engine.pipeline import Pipeline
from pipert.errors import BatchError, ConfigError, GraphError, PartitionError
from pipert.scheduler.action import Action, Kind
from pipert.scheduler.errors import LayoutError, ScheduleError, UnsafeProgramError
from pipert.scheduler.generators.registry import generate
from pipert.scheduler.placement import Placement
from pipert.scheduler.schedule import Schedule
from tests.engine.world import gpt, token_loss, tokens, tower, vectors


def everywhere(ranks: int, work: Callable[[Any], object], error: type[Exception], words: str) -> None:
    """Every rank raises this error with the same text, and no message is sent."""

    def rank(transport: Any) -> str:
        with pytest.raises(error, match=words) as caught:
            work(transport)
        assert transport.counters.messages["send"] == 0
        return str(caught.value)

    texts = run_ranks(ranks, rank)
    assert texts == [texts[0]] * ranks


def build(pp: int, dp: int = 1, **options: Any) -> Callable[[Any], Pipeline]:
    return lambda transport: Pipeline(tower(8), F.mse_loss, Mesh.local(pp=pp, dp=dp), **options)


def cyclic(ranks: int, microbatches: int) -> Schedule:
    """Rank 0 waits for a gradient before it sends the activation that makes it."""
    rows = [
        [Action(0, Kind.F, 0), Action(0, Kind.B, 1), Action(0, Kind.F, 1), Action(0, Kind.B, 0)],
        [Action(1, Kind.F, 0), Action(1, Kind.B, 0), Action(1, Kind.F, 1), Action(1, Kind.B, 1)],
    ]
    return Schedule.of("cyclic", Placement.linear(2), 2, rows)


@pytest.mark.parametrize(
    ("pp", "options", "error", "words"),
    [
        (2, {"microbatches": 0}, ConfigError, "microbatches = 0 must be an integer >= 1"),
        (2, {"microbatches": 2.0}, ConfigError, r"microbatches = 2\.0 must be"),
        (2, {"chunks": 2}, LayoutError, "1f1b puts one stage on a rank, not chunks = 2"),
        (2, {"schedule": "1f1"}, LayoutError, "did you mean '1f1b'"),
        (2, {"recompute": "blocks"}, ConfigError, "recompute = 'blocks' is none of 'none', 'selective'"),
        (4, {"schedule": "interleaved", "chunks": 3}, PartitionError, "8 blocks on 12 stages"),
        (2, {"cuts": [4, 5]}, PartitionError, "add up to 8"),
        (2, {"schedule": generate("1f1b", 3, 8)}, ConfigError, "is for 3 ranks, but pp = 2"),
        (2, {"schedule": cyclic, "microbatches": 2}, UnsafeProgramError, "0B1"),
        (2, {"schedule": lambda ranks, microbatches: None}, ConfigError, "the schedule function returned None"),
        (2, {"schedule": generate("1f1b", 2, 4)}, BatchError, "is for 4 micro-batches, not 8"),
        (2, {"schedule": 3}, ConfigError, "schedule = 3 is none; use a name such as '1f1b'"),
        (2, {"seed": "1"}, ConfigError, "seed = '1' must be an integer"),
        (2, {"dtype": "float32"}, ConfigError, r"dtype = 'float32' is no torch\.dtype; use torch\.float32"),
        (2, {"device": "gpu"}, ConfigError, "device = 'gpu' cannot be used here"),
        (2, {"count_fn": 3}, ConfigError, "count_fn = 3 is not callable"),
    ],
)
def test_a_pipeline_that_cannot_be(pp: int, options: dict[str, Any], error: Any, words: str) -> None:
    everywhere(pp, build(pp, **options), error, words)


def test_a_model_that_is_not_a_chain_of_blocks_is_refused() -> None:
    everywhere(
        2, lambda t: Pipeline(nn.ModuleList([nn.Linear(2, 2)]), F.mse_loss, Mesh.local(pp=2)), GraphError, "order"
    )


def test_a_loss_with_parameters_of_its_own_is_refused() -> None:
    def work(transport: Any) -> None:
        Pipeline(tower(8), nn.Linear(6, 6), Mesh.local(pp=2))  # type: ignore[arg-type]

    everywhere(2, work, ConfigError, "loss_fn Linear has trainable parameters")


@pytest.mark.parametrize("name", ["microbatches", "seed", "recompute", "model"])
def test_ranks_with_different_arguments_find_out(name: str) -> None:
    def work(transport: Any) -> None:
        odd = transport.rank == 1
        values = {"microbatches": 4 + odd, "seed": int(odd), "recompute": "full" if odd else "none"}
        options = {name: values[name]} if name != "model" else {}
        Pipeline(tower(8 + (odd and name == "model")), F.mse_loss, Mesh.local(pp=2), **options)  # type: ignore[arg-type]

    everywhere(2, work, ConfigError, f"ranks 0 and 1 were given different values of {name}")


def test_a_refusal_of_one_rank_is_that_of_all_and_names_it() -> None:
    def work(transport: Any) -> None:
        Pipeline(tower(8), F.mse_loss, Mesh.local(pp=2), chunks=1 - transport.rank)

    everywhere(2, work, ConfigError, "rank 1: chunks = 0 must be an integer >= 1")


def steps(pp: int, dp: int, act: Callable[[Pipeline], object]) -> Callable[[Any], None]:
    def work(transport: Any) -> None:
        mesh = Mesh.local(pp=pp, dp=dp)
        pipe = Pipeline(copy.deepcopy(gpt(layers=4)), token_loss, mesh, microbatches=2)
        act(pipe)

    return work


def pick(pipe: Pipeline, *values: Any) -> Any:
    return values[pipe.mesh.rank]


def test_the_owner_of_the_last_stage_must_bring_targets() -> None:
    act = lambda pipe: pipe.step(pick(pipe, tokens(4), None))  # noqa: E731
    everywhere(2, steps(2, 1, act), BatchError, r"rank 1: a batch must be a pair .*, not NoneType")


def test_inputs_and_targets_must_be_of_one_batch() -> None:
    act = lambda pipe: pipe.step(pick(pipe, tokens(4), [tokens(1)] * 3))  # noqa: E731
    everywhere(2, steps(2, 1, act), BatchError, "rank 0 has inputs for 2 micro-batches, rank 1 has targets for 3")


def test_a_wrong_batch_on_one_replica_is_refused_by_all() -> None:
    act = lambda pipe: pipe.step(pick(pipe, tokens(4), tokens(0), tokens(4), tokens(4)))  # noqa: E731
    everywhere(4, steps(2, 2, act), BatchError, r"rank 1: the inputs have tensors of shapes \[0, 16\]")


def test_ranks_in_different_calls_find_out() -> None:
    act = lambda pipe: (pipe.step if pipe.mesh.rank else pipe.eval_step)(tokens(4))  # noqa: E731
    everywhere(
        2, steps(2, 1, act), ConfigError, "rank 0 is in eval_step, rank 1 in step; every rank must make the same"
    )


def test_autocast_on_one_rank_only_is_found() -> None:
    def act(pipe: Pipeline) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=pipe.mesh.rank == 1):
            pipe.step(tokens(4))

    everywhere(2, steps(2, 1, act), ConfigError, r"rank 1 in step under autocast to torch\.bfloat16")


def test_replicas_that_train_different_parameters_find_out() -> None:
    def act(pipe: Pipeline) -> None:
        if pipe.mesh.rank == 3:
            next(iter(pipe.parameters())).requires_grad_(False)
        pipe.step(tokens(4))

    def work(transport: Any) -> None:
        pipe = Pipeline(tower(8), F.mse_loss, Mesh.local(pp=2, dp=2))
        act(pipe)

    everywhere(4, work, ConfigError, "ranks 2 and 3 hold the same stages, but not the same parameters are trainable")


def test_a_tied_weight_that_is_frozen_on_one_rank_only_is_found() -> None:
    def work(transport: Any) -> None:
        pipe = Pipeline(gpt(layers=4, tied=True), token_loss, Mesh.local(pp=2))
        if transport.rank == 1:
            dict(pipe.named_parameters())["embedding.weight"].requires_grad_(False)
        pipe.step(tokens(4))

    everywhere(2, work, ConfigError, r"tied weight 0 are frozen on rank 1 and trainable on rank 0")


def test_a_refused_step_changes_nothing_and_the_next_one_works() -> None:
    def rank(transport: Any) -> float:
        pipe = Pipeline(tower(8), F.mse_loss, Mesh.local(pp=2), microbatches=2)
        with pytest.raises(BatchError):
            pipe.step(None)
        assert pipe.step_index == 0
        assert all(p.grad is None for p in pipe.parameters())
        return pipe.step(vectors(4)).loss

    assert len(set(run_ranks(2, rank))) == 1


def test_a_schedule_that_has_no_program_for_a_batch_is_refused_before_it_runs() -> None:
    def work(transport: Any) -> None:
        pipe = Pipeline(tower(8), F.mse_loss, Mesh.local(pp=2), schedule=generate("1f1b", 2, 4), microbatches=4)
        pipe.step([vectors(1)] * 3)

    everywhere(2, work, (BatchError, ScheduleError), "is for 4 micro-batches, not 3")  # type: ignore[arg-type]


@pytest.mark.parametrize("microbatches", [0, -1, 2.0, "2", True])
def test_an_evaluation_in_no_number_of_microbatches_is_refused_and_the_next_one_works(microbatches: Any) -> None:
    def evaluate(transport: Any) -> None:
        pipe = build(2)(transport)
        with pytest.raises(ConfigError, match=f"microbatches = {microbatches!r} must be an integer >= 1"):
            pipe.eval_step(vectors(4), microbatches=microbatches)
        pipe.eval_step(vectors(4), microbatches=2)

    run_ranks(2, evaluate)


@pytest.mark.parametrize("max_norm", [0, -1.0, math.nan, "1", None])
def test_gradients_are_not_clipped_to_what_is_no_norm(max_norm: Any) -> None:
    pipe = build(1)(None)
    pipe.step(vectors(4))
    with pytest.raises(ConfigError, match="must be a positive number"):
        pipe.clip_grad_norm_(max_norm)


def test_before_the_first_step_there_is_no_timeline() -> None:
    def work(transport: Any) -> None:
        build(2)(transport).timeline()

    everywhere(2, work, ConfigError, "there is no timeline before the first step")
