"""From one model to each rank's stages: cut alike everywhere, nothing lost, nothing shared by accident."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipert.comm.local import run_ranks
from pipert.comm.mesh import Mesh
from pipert.engine import build
from pipert.engine.parameters import find_ties
from pipert.engine.pipeline import Pipeline
from pipert.errors import PartitionError
from pipert.gpt_config import GPTConfig
from pipert.graph.trace import trace
from pipert.models.gpt import GPT
from tests.engine.world import Outcome, assert_same, gpt, merge, parts, run_plain, token_loss, tokens, tower, vectors


def test_blocks_are_measured_by_one_rank_and_cut_alike_by_all() -> None:
    config = GPTConfig(layers=6, hidden=32, heads=4, sequence=16, vocabulary=61, dropout=0.1)

    def rank(transport: Any) -> tuple[Any, Any, float]:
        pipe = Pipeline(GPT(config), token_loss, Mesh.local(pp=3), microbatches=2, example=tokens(1)[0])
        return pipe.graph, pipe.partition, pipe.step(tokens(2)).loss

    found = run_ranks(3, rank)
    assert found[0][0].costs == "measured"
    assert found == [found[0]] * 3
    assert found[0][1].stages[0].activation_bytes


def test_measuring_changes_neither_weights_nor_random_numbers() -> None:
    def rank(transport: Any, example: Any) -> dict[str, torch.Tensor]:
        model = gpt(layers=3, dropout=0.2)
        pipe = Pipeline(model, token_loss, Mesh.local(pp=2), microbatches=2, cuts=[3, 3], example=example)
        pipe.step(tokens(2))
        return {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}

    torch.manual_seed(0)
    before = torch.get_rng_state()
    without, measured = (run_ranks(2, lambda t, e=e: rank(t, e)) for e in (None, tokens(1)[0]))  # type: ignore[misc]
    assert torch.equal(torch.get_rng_state(), before)
    for one, other in zip(without, measured, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("tied", [False, True])
def test_threads_that_share_one_model_do_not_share_its_parameters(tied: bool) -> None:
    model = gpt(layers=3, tied=tied)
    replicas = [tokens(2, seed=1), tokens(2, seed=2)]
    plain = run_plain(model, token_loss, [[parts(batch, 2) for batch in replicas]])

    def rank(transport: Any) -> Outcome:
        mesh = Mesh.local(pp=2, dp=2)
        pipe = Pipeline(model, token_loss, mesh, microbatches=2)
        outcome = Outcome([pipe.step(replicas[mesh.dp_rank])], norms=[pipe.grad_norm()])
        outcome.gradients = {name: p.grad for name, p in pipe.named_parameters()}
        outcome.weights = {name: p.detach() for name, p in pipe.named_parameters()}
        return outcome

    assert_same(merge(run_ranks(4, rank)), plain)


def test_the_models_own_parameters_are_trained_in_place() -> None:
    models = [tower(4) for _ in range(2)]

    def rank(transport: Any) -> list[str]:
        own = {id(p) for p in models[transport.rank].parameters()}
        pipe = Pipeline(models[transport.rank], F.mse_loss, Mesh.local(pp=2))
        assert all(id(p) in own for p in pipe.parameters())
        return [name for name, _ in pipe.named_parameters()]

    names = [name for names in run_ranks(2, rank) for name in names]
    assert names == [name for name, _ in tower(4).named_parameters()]


def test_stages_that_lose_a_block_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = build.stage_module

    def lossy(traced: Any, stage: int, assignment: Any) -> Any:
        module = real(traced, stage, assignment)
        if stage == 1:
            module.blocks = module.blocks[1:]
        return module

    monkeypatch.setattr(build, "stage_module", lossy)

    def rank(transport: Any) -> None:
        with pytest.raises(PartitionError, match=r"stage 1 lacks.* it holds 90 parameters, not 132"):
            Pipeline(tower(8), F.mse_loss, Mesh.local(pp=2))

    run_ranks(2, rank)


def test_ties_are_the_parameters_of_several_stages_only() -> None:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(6)))
    for i, j in ((0, 1), (2, 5), (3, 4)):
        model[j].weight = model[i].weight
    graph = trace(model).graph
    (tie,) = find_ties(graph, [["0", "1", "2"], ["3", "4"], ["5"]])
    assert (tie.name, tie.stages) == ("2.weight", (0, 2))


def test_the_table_lists_every_stage() -> None:
    def rank(transport: Any) -> str:
        return Pipeline(gpt(layers=4), token_loss, Mesh.local(pp=2)).table()

    first, second = run_ranks(2, rank)
    assert first == second
    assert "embedding" in first.splitlines()[1]
    assert "head" in first.splitlines()[2]


def test_a_step_of_a_pipeline_on_the_meta_device_runs_in_the_dtype_asked_for() -> None:
    config = GPTConfig(layers=2, hidden=16, heads=2, sequence=16, vocabulary=61, dropout=0.0)

    def rank(transport: Any) -> set[tuple[torch.dtype, torch.dtype]]:
        pipe = Pipeline(GPT(config), token_loss, Mesh.local(pp=2), microbatches=2, dtype=torch.bfloat16)
        pipe.step(tokens(2))
        return {(p.dtype, p.grad.dtype) for p in pipe.parameters() if p.grad is not None}

    assert run_ranks(2, rank) == [{(torch.bfloat16, torch.float32)}] * 2


def test_two_inputs_of_one_batch_make_one_loss() -> None:
    x, y = vectors(4)
    pipe = Pipeline(tower(2), F.mse_loss, Mesh.local(), microbatches=8)
    assert pipe.step((x, y)).microbatches == 4
