"""A vocabulary spread over all ranks gives the numbers of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from pipert.comm.faults import Faults
from pipert.comm.local import run_ranks
from pipert.comm.mesh import Mesh
from pipert.engine.pipeline import Pipeline
from pipert.engine.shard_loss import HeadRows, combine, input_gradient, score, weight_gradient
from pipert.errors import BatchError, ConfigError, PartitionError
from pipert.gpt_config import GPTConfig
from pipert.layers.spread import TokenLoss
from pipert.models import GPT, CausalLMLoss
from pipert.optim.adamw import ZeroAdamW
from pipert.scheduler.action import Kind
from tests.engine.spread_world import Smoothed, run_spread
from tests.engine.world import ADAMW, SGD, assert_same, gpt, parts, run_pipeline, run_plain, tokens
from tests.mpi_harness import run_mpi

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 1)]


@st.composite
def worlds(draw: st.DrawFn) -> dict[str, Any]:
    """A layout, a model, batches with ignored tokens, an optimizer and a transport."""
    schedule, chunks = draw(st.sampled_from(SCHEDULES))
    pp, dp = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (4, 2)]))
    two = schedule in ("interleaved", "zb-v")
    model = gpt(
        layers=draw(st.integers(max(2 * pp if two else pp, 2) - 1, 7)),
        tied=draw(st.booleans()),
        positions=draw(st.sampled_from(["learned", "rotary"])),
        hidden=16,
    )
    steps = []
    for _ in range(2):
        replicas = []
        for _ in range(dp):
            ids, targets = tokens(draw(st.integers(1, 6)), draw(st.integers(1, 9)), draw(st.integers(0, 99)))
            replicas.append((ids, targets.masked_fill(ids % 7 == draw(st.integers(0, 7)), -100)))
        steps.append(replicas)
    return {
        "model": model,
        "loss_fn": draw(st.sampled_from([CausalLMLoss(), Smoothed()])),
        "steps": steps,
        "pp": pp,
        "dp": dp,
        "microbatches": draw(st.integers(1, 6)),
        "schedule": schedule,
        "chunks": chunks,
        "optimizer": draw(st.sampled_from([SGD, ADAMW])),
        "recompute": draw(st.sampled_from(["none", "block", "full"])),
        "transport": {
            "matching": draw(st.sampled_from(["tag", "order"])),
            "faults": Faults(draw(st.integers(0, 99)), delay=draw(st.sampled_from([0.0, 0.5]))),
        },
    }


@given(worlds())
@settings(max_examples=16)
def test_any_layout_gives_the_numbers_of_one_process(world: dict[str, Any]) -> None:
    plain = [[parts(batch, world["microbatches"]) for batch in step] for step in world["steps"]]
    wanted = run_plain(world["model"], world["loss_fn"], plain, optimizer=world["optimizer"])
    assert_same(run_spread(**world), wanted)


@pytest.mark.parametrize("tied", [False, True])
def test_three_steps_of_adamw_on_replicas(tied: bool) -> None:
    model = gpt(tied=tied, layers=4)
    steps = [[tokens(4, seed=2 * step), tokens(3, length=12, seed=2 * step + 1)] for step in range(3)]
    mine = run_spread(model, CausalLMLoss(), steps, 4, 2, optimizer=ADAMW, microbatches=4)
    plain = [[parts(batch, 4) for batch in step] for step in steps]
    assert_same(mine, run_plain(model, CausalLMLoss(), plain, optimizer=ADAMW))


@pytest.mark.parametrize(("zero", "early"), [(0, True), (1, False), (1, True)])
def test_the_shards_of_replicas_are_updated_by_pipert_s_own_optimizer(zero: int, early: bool) -> None:
    model = gpt(tied=True, layers=4)
    steps = [[tokens(4, seed=2 * step), tokens(4, seed=2 * step + 1)] for step in range(3)]
    optimizers: dict[str, Any] = {
        "zero": lambda pipe: ZeroAdamW(pipe, zero=zero, lr=0.01, early=early),
        "plain": lambda pipe: torch.optim.AdamW(pipe.parameters(), lr=0.01),
    }
    runs = {
        name: run_spread(model, CausalLMLoss(), steps, 2, 2, microbatches=3, pipe_optimizer=make)
        for name, make in optimizers.items()
    }
    for name, weight in runs["plain"].weights.items():
        torch.testing.assert_close(runs["zero"].weights[name], weight, rtol=1e-10, atol=1e-10)


def test_the_same_layout_twice_is_bitwise_equal() -> None:
    model, steps = gpt(layers=4, dropout=0.2, dtype=torch.float32), [[tokens(6, seed=step)] for step in range(3)]
    once, again = (run_spread(model, Smoothed(), steps, 4, optimizer=SGD, microbatches=5) for _ in range(2))
    assert once.results == again.results
    assert_same(once, again, 0)


def test_dropout_behind_the_embedding_has_the_same_masks_as_at_the_ends() -> None:
    model, steps = gpt(layers=4, dropout=0.3), [[tokens(5, seed=step)] for step in range(2)]
    options: dict[str, Any] = {"optimizer": SGD, "microbatches": 3, "seed": 5}
    mine = run_spread(model, CausalLMLoss(), steps, 3, **options)
    assert_same(mine, run_pipeline(model, CausalLMLoss(), steps, 1, **options))


def test_a_batch_in_which_nothing_counts_gives_zero_gradients_and_a_warning() -> None:
    model, (ids, targets) = gpt(layers=3), tokens(4)
    with pytest.warns(UserWarning, match="the loss counts nothing in the whole batch"):
        mine = run_spread(model, CausalLMLoss(), [[(ids, torch.full_like(targets, -100))]], 2, microbatches=2)
    assert mine.results[0].loss == 0.0
    assert all(gradient is not None and not gradient.any() for gradient in mine.gradients.values())


def test_a_micro_batch_in_which_nothing_counts_adds_nothing() -> None:
    model, (ids, targets) = gpt(layers=3), tokens(4)
    targets[2:] = -100
    mine = run_spread(model, CausalLMLoss(), [[(ids, targets)]], 2, microbatches=2)
    assert_same(mine, run_plain(model, CausalLMLoss(), [[parts((ids, targets), 2)]]))


FROZEN = {
    "all but the embedding": lambda name: name != "embedding.weight",
    "all but the head": lambda name: name != "head.weight",
    "embedding": lambda name: name == "embedding.weight",
    "head": lambda name: name == "head.weight",
    "both": lambda name: name in ("embedding.weight", "head.weight"),
    "all up to block 2": lambda name: name.startswith(("embedding", "blocks.0", "blocks.1")),
}


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize(("pp", "dp"), [(3, 1), (2, 2)])
def test_frozen_parts_get_no_gradient_and_the_others_that_of_one_process(frozen: str, pp: int, dp: int) -> None:
    model = gpt(tied=False, layers=4)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not FROZEN[frozen](name))
    steps = [[tokens(4, seed=replica) for replica in range(dp)]]
    mine = run_spread(model, CausalLMLoss(), steps, pp, dp, microbatches=4)
    assert_same(mine, run_plain(model, CausalLMLoss(), [[parts(batch, 4) for batch in steps[0]]]))


def test_an_evaluation_gives_the_loss_and_changes_nothing() -> None:
    model, batch = gpt(layers=4, dropout=0.5), tokens(5)

    def rank(transport: Any) -> tuple[float, float, list[torch.Tensor | None]]:
        pipe = Pipeline(copy.deepcopy(model), CausalLMLoss(), Mesh.local(pp=3), vocabulary="spread", microbatches=2)
        losses = [pipe.eval_step(batch, microbatches=m).loss for m in (3, 5)]
        with pytest.raises(ConfigError, match="outputs=True asks for whole logits"):
            pipe.eval_step(batch, outputs=True)
        return losses[0], losses[1], [p.grad for p in pipe.parameters()]

    wanted = CausalLMLoss()(model.eval()(batch[0]), batch[1]).item()
    for first, second, gradients in run_ranks(3, rank):
        assert first == pytest.approx(wanted, rel=1e-12)
        assert second == pytest.approx(wanted, rel=1e-12)
        assert gradients == [None] * len(gradients)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_on_the_meta_device_starts_with_the_weights_of_one_process(tied: bool) -> None:
    config = GPTConfig(layers=3, hidden=32, heads=4, sequence=16, vocabulary=61, tied=tied)
    mine = run_spread(GPT(config), CausalLMLoss(), [], 3, seed=7)
    whole = dict(GPT(config, device="cpu", seed=7).named_parameters())
    assert set(mine.weights) == set(whole)
    for name, weight in whole.items():
        assert torch.equal(mine.weights[name], weight), name


def test_other_peoples_models_take_part_with_torchs_own_layers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(13, 6), nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 13, bias=False)
    ).double()
    batch = tokens(6, 5, vocabulary=13)
    mine = run_spread(model, CausalLMLoss(), [[batch]], 2, microbatches=3)
    assert_same(mine, run_plain(model, CausalLMLoss(), [[parts(batch, 3)]]))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_near_one_process(precision: str) -> None:
    model, batch = gpt(layers=3, dtype=torch.float32), tokens(4)
    mine = run_spread(model, CausalLMLoss(), [[batch]], 3, microbatches=2, precision=precision)
    wanted = run_plain(model, CausalLMLoss(), [[parts(batch, 2)]])
    assert mine.results[0].loss == pytest.approx(wanted.results[0].loss, rel=2e-2)
    assert mine.norms[0] == pytest.approx(wanted.norms[0], rel=5e-2)
    assert mine.gradients["embedding.weight"] is not None
    assert mine.gradients["embedding.weight"].dtype == torch.float32


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shift", [0.0, 1000.0])
def test_loss_and_gradients_of_shards_are_those_of_whole_logits(smoothing: float, shift: float) -> None:
    """Also where one rank's logits are far above the others', with targets at both ends of the vocabulary."""
    torch.manual_seed(1)
    weight, x = torch.randn(7, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    x[:, 0] = 1.0
    weight[5:, 0] += shift
    targets = torch.tensor([0, 2, 3, 6, -100, 5])
    loss, rows = TokenLoss(smoothing=smoothing, z_loss=0.001), [(0, 3), (3, 5), (5, 7)]
    shards = [HeadRows(weight[start:stop], start, 7, loss) for start, stop in rows]
    scores = [score(shard, x, targets, gradient=True) for shard in shards]
    totals = combine(loss, 7, torch.stack([one.own_4N for one in scores]), targets)
    share = totals.share(0.25)
    pairs = list(zip(shards, scores, strict=True))
    of_input = sum(input_gradient(shard, one, totals, share, targets) for shard, one in pairs)
    of_weight = torch.cat([weight_gradient(shard, one, totals, share, targets) for shard, one in pairs])
    whole_x, whole_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    logits = F.linear(whole_x, whole_weight)
    wanted = Smoothed(smoothing, 0.001)(logits[None], targets[None])
    (0.25 * wanted).backward()
    torch.testing.assert_close(totals.mean, wanted.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(of_input, whole_x.grad, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(of_weight, whole_weight.grad, rtol=1e-10, atol=1e-10)


# ---- what is refused -----------------------------------------------------------------------------------------------


def refused(work: Any, ranks: int = 2) -> list[str]:
    """What every rank's refusal says."""

    def rank(transport: Any) -> str:
        with pytest.raises((ConfigError, BatchError, PartitionError)) as caught:
            work(Mesh.local(pp=ranks))
        return str(caught.value)

    return run_ranks(ranks, rank)


def test_ids_and_targets_outside_the_vocabulary_are_refused_on_every_rank() -> None:
    ids, targets = tokens(4)
    for wrong, words in (
        ((ids.clone().index_fill_(1, torch.tensor(0), 61), targets), "inputs of micro-batch 0 hold 61; token ids are"),
        ((ids, targets.clone().index_fill_(1, torch.tensor(0), 61)), "targets of micro-batch 0 hold 61; token ids are"),
        ((ids, targets.clone().index_fill_(1, torch.tensor(0), -1)), "targets of micro-batch 0 hold -1"),
        ((ids.double(), targets), "inputs of micro-batch 0 are no tensor of token ids"),
    ):

        def step(mesh: Mesh, batch: Any = wrong) -> None:
            Pipeline(gpt(layers=2), CausalLMLoss(), mesh, vocabulary="spread", microbatches=2).step(batch)

        assert all(words in message for message in refused(step))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocabulary": "everywhere"}, "vocabulary = 'everywhere' is none of 'ends', 'spread'"),
        ({"loss_fn": F.cross_entropy}, "does not say that it can be computed from parts of the logits"),
        ({"model": nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])}, "cannot be spread: the model must be a chain"),
        (
            {"model": gpt(layers=1, vocabulary=1)},
            "a vocabulary of 1 over pp = 2 ranks is 1 rows each",
        ),
        (
            {"model": nn.Sequential(nn.Embedding(5, 4, padding_idx=0), nn.Tanh(), nn.Linear(4, 5, bias=False))},
            "the first block, 0 (Embedding), does not say that it looks rows up",
        ),
    ],
)
def test_what_cannot_be_spread_is_refused_before_anything_is_sent(change: dict[str, Any], words: str) -> None:
    options = {"model": gpt(layers=2), "loss_fn": CausalLMLoss(), "vocabulary": "spread", **change}
    model, loss_fn = options.pop("model"), options.pop("loss_fn")
    messages = refused(lambda mesh: Pipeline(model, loss_fn, mesh, **options))
    assert all(words in message for message in messages), messages


# ---- how it runs ---------------------------------------------------------------------------------------------------


def test_every_rank_holds_its_rows_and_the_timeline_shows_its_part() -> None:
    model, batch = gpt(tied=False, layers=4), tokens(4)

    def rank(transport: Any) -> tuple[int, int, set[Kind], str]:
        pipe = Pipeline(copy.deepcopy(model), CausalLMLoss(), Mesh.local(pp=4), vocabulary="spread", microbatches=4)
        pipe.step(batch)
        rows = dict(pipe.named_parameters())["head.weight"].shape[0]
        timeline = pipe.timeline()
        kinds = {action.kind for number, action, _, _ in timeline if number == transport.rank}
        return rows, sum(p.numel() for p in pipe.parameters()), kinds, pipe.table()

    found = run_ranks(4, rank)
    assert [rows for rows, *_ in found] == [16, 16, 16, 16]  # the last three are no token's
    padding = 2 * 3 * 32
    assert sum(numel for _, numel, *_ in found) == padding + sum(p.numel() for p in model.parameters())
    for _, _, kinds, table in found:
        assert {Kind.S, Kind.T, Kind.G} <= kinds
        assert "embedding and head spread over all ranks: 3,904 parameters" in table


@pytest.mark.mpi
def test_over_mpi_it_gives_the_numbers_of_one_process() -> None:
    script = """
    import torch
    torch.set_num_threads(1)
    from pipert.comm.mesh import Mesh
    from pipert.engine.pipeline import Pipeline
    from pipert.layers import shard_of, to_shard
    from pipert.models import CausalLMLoss
    from tests.engine.world import ADAMW, gpt, parts, run_plain, tokens
    for schedule, tied in (("1f1b", True), ("zb-v", False)):
        model, steps = gpt(tied=tied, layers=6), [tokens(6, seed=step) for step in range(3)]
        mesh = Mesh.from_mpi(pp=3)
        pipe = Pipeline(gpt(tied=tied, layers=6), CausalLMLoss(), mesh, schedule, 5, vocabulary="spread")
        optim = ADAMW(pipe.parameters())
        wanted = run_plain(model, CausalLMLoss(), [[parts(batch, 5)] for batch in steps], optimizer=ADAMW)
        for number, batch in enumerate(steps):
            optim.zero_grad()
            result = pipe.step(batch)
            assert abs(result.loss - wanted.results[number].loss) < 1e-10
            assert abs(pipe.grad_norm() - wanted.norms[number]) < 1e-10
            optim.step()
        for name, parameter in pipe.named_parameters():
            whole = wanted.weights[name]
            shard = shard_of(parameter)
            rows = whole if shard is None else to_shard(whole, shard)
            torch.testing.assert_close(parameter.detach(), rows, rtol=1e-10, atol=1e-10)
        print("rank", mesh.rank, "is well")
        mesh.close()
    """
    result = run_mpi(3, script, timeout=150, deadline=60)
    assert result.returncode == 0, result.text
    assert result.stdout.count("is well") == 6, result.text
