"""Pipelines whose stages are shared out among tensor-parallel ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipert.comm.local import run_ranks
from pipert.comm.mesh import Mesh
from pipert.engine.pipeline import Pipeline
from pipert.engine.reference import reference_step
from pipert.errors import ConfigError
from pipert.layers.parallelize import Plan, Split, parallelize
from pipert.layers.shard import shard_of
from pipert.models import GPT, CausalLMLoss, GPTConfig
from tests.engine.world import seeded
from tests.models.layouts import SEED, batches, merged
from tests.mpi_harness import run_mpi

SHAPE: dict[str, Any] = {"layers": 4, "hidden": 32, "heads": 4, "sequence": 16, "vocabulary": 61}
LLAMA: dict[str, Any] = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "bias": False}


class Layer(nn.Module):
    """A block of somebody else's: torch's own layers, and dropout from torch's global generator."""

    def __init__(self, width: int, heads: int, p: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, width // 2), nn.Linear(width, width // 2)
        self.o = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.dropout = nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, width = self.norm(x), x.shape[-1] // self.heads
        q, k, v = (part(y).unflatten(-1, (-1, width)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.dropout(self.down(F.gelu(self.up(x))))


def theirs(p: float = 0.0, device: str = "cpu", tied: bool = False) -> nn.Sequential:
    with seeded(0), torch.device(device):
        embedding, head = nn.Embedding(61, 16, padding_idx=3), nn.Linear(16, 61, bias=False)
        if tied:
            head.weight = embedding.weight
        return nn.Sequential(embedding, *(Layer(16, 4, p) for _ in range(3)), head).double()


PLAN: Plan = {
    "0": "vocab",
    "*.q": Split("column", units=4),
    "*.[kv]": Split("column", units=2),
    "*.o": Split("row", units=4),
    "*.up": "column",
    "*.down": "row",
    "*.dropout": "replicated",
    "4": "vocab",
}


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(61, (4, 9), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gradients(
    make: Any, pp: int, tp: int, plan: Plan = PLAN, **options: Any
) -> tuple[tuple[float, float], dict[str, torch.Tensor]]:
    """Loss and norm, and whole gradients."""
    models = [make() for _ in range(pp * tp)]  # here, because threads have one global generator

    def rank(transport: Any) -> tuple[tuple[float, float], dict[str, Any]]:
        mesh = Mesh.local(pp=pp, tp=tp)
        pipe = Pipeline(
            parallelize(models[transport.rank], mesh, plan=plan), loss, mesh, microbatches=2, seed=5, **options
        )
        result = pipe.step(tokens())
        return (result.loss, pipe.grad_norm()), {name: (p.grad, shard_of(p)) for name, p in pipe.named_parameters()}

    outcomes = run_ranks(pp * tp, rank, deadline=120)
    assert len({found for found, _ in outcomes}) == 1
    return outcomes[0][0], merged([parts for _, parts in outcomes], tp)


@pytest.mark.parametrize(
    ("pp", "tp", "schedule"), [(1, 2, "1f1b"), (2, 2, "zb-h1"), (1, 4, "1f1b"), (2, 2, "interleaved")]
)
@pytest.mark.parametrize("tied", [False, True])
def test_a_plan_shares_out_other_peoples_models(pp: int, tp: int, schedule: str, tied: bool) -> None:
    model = theirs(tied=tied)
    wanted = reference_step(model, loss, tokens(), 2, seed=5).loss
    chunks = 2 if schedule == "interleaved" else 1
    got, found = gradients(lambda: theirs(tied=tied), pp, tp, schedule=schedule, chunks=chunks)
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))  # type: ignore[misc]
    assert got == (pytest.approx(wanted, rel=1e-12), pytest.approx(norm, rel=1e-10))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-10, atol=1e-12, msg=name)


def test_initial_values_of_torchs_layers_are_parts_of_the_whole_ones() -> None:
    def weights(tp: int) -> dict[str, torch.Tensor]:
        def rank(_: Any) -> dict[str, Any]:
            mesh = Mesh.local(tp=tp)
            pipe = Pipeline(parallelize(theirs(device="meta"), mesh, plan=PLAN), loss, mesh, seed=5)
            return {name: (p.detach(), shard_of(p)) for name, p in pipe.named_parameters()}

        return merged(run_ranks(tp, rank), tp)

    whole, two = weights(1), weights(2)
    assert whole.keys() == two.keys()
    assert all(torch.equal(whole[name], two[name]) for name in whole)


def test_dropout_from_torchs_global_generator_neither_deadlocks_nor_depends_on_the_ranks() -> None:
    model = theirs(0.5)
    wanted = reference_step(model, loss, tokens(), 2, seed=5).loss
    state = torch.get_rng_state()
    got, found = gradients(lambda: theirs(0.5), 2, 2, recompute="block")
    assert torch.equal(torch.get_rng_state(), state)
    assert got[0] == pytest.approx(wanted, rel=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-10, atol=1e-12, msg=name)


def test_dropout_between_column_and_row_draws_another_mask_on_each_rank() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.drop, self.down = nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 8)
            nn.init.zeros_(self.up.weight)
            nn.init.ones_(self.up.bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mask = self.drop(self.up(x))
            return self.down(self.mask)

    def rank(_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        mesh, model = Mesh.local(tp=2), nn.Sequential(Inner())
        plan: Plan = {"*.up": "column", "*.drop": Split("column", dim=1), "*.down": "row"}
        pipe = Pipeline(parallelize(model, mesh, plan=plan), F.mse_loss, mesh, microbatches=1)
        masks = []
        for _ in range(2):
            pipe.step((torch.ones(64, 8), torch.ones(64, 8)))
            masks.append(pipe.modules[0].members[0].mask.detach() != 0)
        return masks[0], masks[1]

    (first, later), (second, _) = run_ranks(2, rank)
    for other in (second, later):
        assert float((first == other).float().mean()) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"*.nothing": "column", "*.dropout": "replicated"}, r"patterns \*\.nothing match no module of Sequential"),
        ({"*.up": "diagonal"}, "a plan says 'diagonal', which is none of column, row, vocab, replicated"),
        ({"*.norm": "column", "*.dropout": "replicated"}, r"1\.norm is a LayerNorm, which cannot be split as column"),
        ({"*.up": "column"}, r"does not say what the dropout layer 1\.dropout is"),
        ({"0": "row", "*.dropout": "replicated"}, "0 is a Embedding, which cannot be split as row"),
        ({"*.up": "vocab", "*.dropout": "replicated"}, r"1\.up has a bias; split it as"),
        ({"*.k": Split("column", units=3), "*.dropout": "replicated"}, "8 rows of 3 units"),
    ],
)
def test_plans_that_cannot_be_followed_are_refused_and_leave_the_model_alone(plan: Any, words: str) -> None:
    def rank(_: Any) -> None:
        model = theirs(0.1)
        before = repr(model)
        with pytest.raises(ConfigError, match=words):
            parallelize(model, Mesh.local(tp=2), plan=plan)
        assert repr(model) == before

    run_ranks(2, rank)


def test_models_that_all_ranks_would_compute_alike_are_refused_with_the_remedy() -> None:
    def rank(_: Any) -> None:
        mesh = Mesh.local(tp=2)
        with pytest.raises(ConfigError, match=r"tp = 2, but Sequential has no tensor-parallel layers.*parallelize\("):
            Pipeline(theirs(), loss, mesh)
        with pytest.raises(ConfigError, match=r"Sequential does not know how to share itself out among tp = 2"):
            parallelize(theirs(), mesh)

    run_ranks(2, rank)


def test_ranks_that_are_threads_may_share_one_model() -> None:
    for model in (GPT(GPTConfig(**SHAPE)), GPT(GPTConfig(**SHAPE), "cpu", seed=0)):
        ids = torch.zeros(2, 8, dtype=torch.int64)
        before = [name for name, _ in model.named_parameters()]

        def rank(_: Any, model: nn.Module = model, ids: torch.Tensor = ids) -> float:
            pipe = Pipeline(model, CausalLMLoss(), Mesh.local(pp=2, tp=2), microbatches=2)
            optim = torch.optim.SGD(pipe.parameters(), lr=0.1)
            first = pipe.step((ids, ids)).loss
            optim.step()
            return first - pipe.eval_step((ids, ids)).loss

        falls = run_ranks(4, rank)
        assert len(set(falls)) == 1 and falls[0] > 0
        assert [name for name, _ in model.named_parameters()] == before
        assert model.embedding.weight.shape == (61, 32)


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (1, 2), (1, 4), (2, 2)])
def test_a_tied_embedding_alone_has_the_same_norm_in_every_layout(pp: int, tp: int) -> None:
    def rank(_: Any) -> tuple[float, float]:
        pipe = Pipeline(GPT(GPTConfig(**SHAPE)), CausalLMLoss(), Mesh.local(pp=pp, tp=tp))
        for name, parameter in pipe.named_parameters():
            if name == "embedding.weight":
                parameter.grad = torch.zeros_like(parameter)
                shard = shard_of(parameter)
                rows = len(parameter) if shard is None else shard.filled
                parameter.grad[:rows] = math.sqrt(800 / (61 * 32))
        before = pipe.clip_grad_norm_(1.0)
        return before, pipe.grad_norm()

    for before, after in run_ranks(pp * tp, rank):
        assert before == pytest.approx(28.284271, abs=1e-6)
        assert after == pytest.approx(1.0, rel=1e-5)


def test_what_is_trainable_must_be_so_on_all_tensor_parallel_ranks() -> None:
    ids = torch.zeros(2, 8, dtype=torch.int64)

    def rank(_: Any) -> None:
        mesh = Mesh.local(tp=2)
        pipe = Pipeline(GPT(GPTConfig(**SHAPE)), CausalLMLoss(), mesh, microbatches=1)
        next(pipe.parameters()).requires_grad_(mesh.tp_rank == 0)
        with pytest.raises(ConfigError, match="set requires_grad alike on every replica and tensor-parallel rank"):
            pipe.step((ids, ids))

    run_ranks(2, rank)


def test_blocks_that_communicate_are_measured_by_all_who_share_them() -> None:
    ids = torch.zeros(2, 8, dtype=torch.int64)

    def rank(_: Any) -> list[float | None]:
        mesh = Mesh.local(pp=2, tp=2)
        model = parallelize(GPT(GPTConfig(**SHAPE)), mesh, sequence_parallel=True)
        pipe = Pipeline(model, CausalLMLoss(), mesh, microbatches=2, example=ids)
        pipe.step((ids, ids))
        return [block.forward for block in pipe.graph.blocks]

    first, *others = run_ranks(4, rank)
    assert all(other == first for other in others)
    assert all(seconds is not None and seconds > 0 for seconds in first)


def test_estimates_and_sizes_are_those_of_one_rank() -> None:
    def rank(_: Any) -> tuple[int, int]:
        pipe = Pipeline(GPT(GPTConfig(**SHAPE)), CausalLMLoss(), Mesh.local(tp=2))
        block = pipe.graph.blocks[1]
        return block.numel, sum(p.numel() for p in pipe.parameters())

    config = GPTConfig(**SHAPE)
    inner = config.qkv_width + config.up_width  # biases of the column layers
    block = (config.block_weights + inner) // 2 + 6 * config.hidden
    rows = (62 * 32) // 2 + 16 * 32
    assert run_ranks(2, rank) == [(block, 4 * block + rows + 2 * 32)] * 2


def test_three_steps_before_an_update_add_up_and_nothing_is_summed_twice() -> None:
    config = GPTConfig(**SHAPE, kv_heads=1)
    steps = batches(config, 3, 4)
    model = GPT(config, "cpu", seed=SEED, dtype=torch.float64)
    for number, batch in enumerate(steps):
        reference_step(model, CausalLMLoss(), batch, 2, seed=SEED, step=number)

    def rank(_: Any) -> dict[str, Any]:
        mesh = Mesh.local(pp=2, tp=2)
        part = parallelize(GPT(config, dtype=torch.float64), mesh, sequence_parallel=True)
        pipe = Pipeline(part, CausalLMLoss(), mesh, microbatches=2, seed=SEED)
        for batch in steps:
            pipe.step(batch)
        return {name: (p.grad, shard_of(p)) for name, p in pipe.named_parameters()}

    found = merged(run_ranks(4, rank), 2)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains_alike_with_and_without_tensor_parallelism(precision: str) -> None:
    config = GPTConfig(**SHAPE, **LLAMA)
    steps = batches(config, 3, 4)

    def losses(tp: int, sequence_parallel: bool) -> list[float]:
        def rank(_: Any) -> list[float]:
            mesh = Mesh.local(pp=2, tp=tp)
            part = parallelize(GPT(config), mesh, sequence_parallel=sequence_parallel)
            pipe = Pipeline(part, CausalLMLoss(), mesh, microbatches=2, seed=SEED, precision=precision)
            found: list[float] = []
            for batch in steps:
                found.append(pipe.step(batch).loss)
                pipe.decide(max_norm=1.0)
                for parameter in pipe.parameters():
                    parameter.data.sub_(0.1 * parameter.grad.to(parameter.dtype))
                    parameter.grad = None
            return found

        first, *others = run_ranks(2 * tp, rank)
        assert all(other == first for other in others)
        return first

    wanted = losses(1, False)
    assert losses(2, False) == pytest.approx(wanted, rel=2e-3)
    assert losses(2, True) == pytest.approx(wanted, rel=2e-3)


@pytest.mark.mpi
def test_a_gpt_over_8_mpi_ranks_has_the_numbers_of_one_process() -> None:
    script = """
        import torch
        torch.set_num_threads(1)
        import pipert
        from pipert.layers.shard import gather_full, shard_of
        from pipert.models import GPT, CausalLMLoss, GPTConfig
        from tests.models.layouts import alone, batches, SEED

        config = GPTConfig(layers=4, hidden=32, heads=4, kv_heads=1, sequence=8, vocabulary=61, activation="swiglu")
        steps = batches(config, 2, 8, ignored=0.2)
        adamw = lambda parameters: torch.optim.AdamW(parameters, lr=0.01)
        wanted = alone(config, steps, 4, optimizer=adamw)
        mesh = pipert.Mesh.from_mpi(pp=2, dp=2, tp=2)
        for sequence_parallel, schedule in ((True, "1f1b"), (False, "zb-h1")):
            model = GPT(config, seed=SEED, dtype=torch.float64)
            pipert.parallelize(model, mesh, sequence_parallel=sequence_parallel)
            pipe = pipert.Pipeline(model, CausalLMLoss(), mesh, schedule=schedule, microbatches=2, seed=SEED)
            optim = adamw(pipe.parameters())
            for (inputs, targets), loss, norm in zip(steps, wanted.losses, wanted.norms):
                optim.zero_grad()
                share = slice(4 * mesh.dp_rank, 4 * mesh.dp_rank + 4)
                assert abs(pipe.step((inputs[share], targets[share])).loss - loss) < 1e-10
                assert abs(pipe.grad_norm() - norm) < 1e-10
                optim.step()
            for name, parameter in pipe.named_parameters():
                for got, expected in ((parameter.grad, wanted.gradients), (parameter.detach(), wanted.weights)):
                    shard = shard_of(parameter)
                    got = got if shard is None else gather_full(got, shard, mesh.tp_group)
                    torch.testing.assert_close(got, expected[name], rtol=1e-10, atol=1e-10, msg=name)
        print("rank", mesh.rank, "is well")
        mesh.close()
    """
    result = run_mpi(8, script, timeout=200, deadline=100)
    assert result.returncode == 0, result.text
    assert result.stdout.count("is well") == 8, result.text
