"""Half precision: sums in fp32, the same numbers in every layout, and one decision about every update."""

from __future__ import annotations

import copy
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
from pipert.models.loss import CausalLMLoss
from pipert.optim import LossScale, Precision
from pipert.optim.adamw import ZeroAdamW
from tests.engine.world import Outcome, assert_same, gpt, run_pipeline, tokens, tower, vectors

LAYOUTS = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 1)]


class Shared(nn.Module):
    """A product with a weight that is used in another way too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) + x * self.linear.weight[0]


def identity(width: int) -> nn.Linear:
    layer = nn.Linear(width, width, bias=False)
    layer.weight.data.copy_(torch.eye(width))
    return layer


def total(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.sum()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_many_small_gradients_of_a_bf16_weight_add_up(schedule: str) -> None:
    values = [1.0, *[0.002] * 256]
    batch = [(torch.full((1, 1), value, dtype=torch.bfloat16), torch.zeros(1)) for value in values]

    def rank(transport: Any) -> dict[str, torch.Tensor | None]:
        pipe = Pipeline(
            nn.Sequential(identity(1), identity(1)),
            total,
            Mesh.local(pp=2),
            schedule=schedule,
            microbatches=257,
            count_fn=lambda target: 1,
            precision="bf16",
        )
        pipe.step(batch)
        return {name: p.grad for name, p in pipe.named_parameters()}

    for found in run_ranks(2, rank):
        for name, gradient in found.items():
            assert gradient is not None
            assert gradient.dtype == torch.float32
            assert 257 * gradient.item() == pytest.approx(1.512, abs=8e-3), name  # each weight 1/257 is a bf16 number


def reference(model: nn.Module, loss: Any, replicas: list[Any], precision: str, steps: int = 1, **more: Any) -> Outcome:
    exact = Precision.of(precision)
    assert exact is not None
    plain, outcome = copy.deepcopy(model).to(exact.parameters), Outcome()
    for step in range(steps):
        first, *others = replicas
        outcome.results.append(
            reference_step(plain, loss, first, 4, replicas=others, seed=5, step=step, precision=exact, **more)
        )
    outcome.gradients = {name: p.grad for name, p in plain.named_parameters()}
    outcome.weights = {name: p.detach() for name, p in plain.named_parameters()}
    return outcome


@pytest.mark.parametrize(("schedule", "chunks"), LAYOUTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["gpt", "shared"])
def test_pipelines_are_bitwise_one_process_in_every_precision(
    kind: str, precision: str, schedule: str, chunks: int
) -> None:
    exact = Precision.of(precision)
    assert exact is not None
    ours = kind == "gpt"
    model = (
        gpt(torch.float32, tied=False, layers=5, sequence=8, dropout=0.1)
        if ours
        else nn.Sequential(*[Shared() for _ in range(8)])
    )
    loss: Any = CausalLMLoss() if ours else F.mse_loss
    batch: Any = tokens(4, 8) if ours else tuple(tensor.to(exact.parameters) for tensor in vectors(4))
    mine = run_pipeline(
        model, loss, [[batch]] * 2, 4, schedule=schedule, chunks=chunks, microbatches=4, precision=precision, seed=5
    )
    mine.norms = []
    assert_same(mine, reference(model, loss, [batch], precision, 2), 0)
    assert {tensor.dtype for tensor in mine.weights.values()} == {exact.parameters}
    assert {g.dtype for g in mine.gradients.values() if g is not None} == {exact.gradients}


def test_bf16_gradients_of_replicas_and_tied_weights_are_summed_in_fp32() -> None:
    model, replicas = gpt(torch.float32, layers=2), [tokens(4, seed=1), tokens(4, seed=2)]
    mine = run_pipeline(model, CausalLMLoss(), [replicas], 2, 2, microbatches=4, precision="bf16", seed=5)
    mine.norms = []
    assert_same(mine, reference(model, CausalLMLoss(), replicas, "bf16"), 1e-6)


def test_what_was_there_before_is_added_to_and_not_rescaled() -> None:
    def rank(transport: Any) -> list[torch.Tensor | None]:
        mesh = Mesh.local(pp=2)
        pipe = Pipeline(tower(4, dtype=torch.float32), F.mse_loss, mesh, microbatches=2, precision="fp16")
        assert pipe.loss_scale.scale == 2.0**16
        batch = tuple(tensor.half() for tensor in vectors(4))
        pipe.step(batch)
        once = [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
        for p in pipe.parameters():
            p.grad = torch.ones_like(p, dtype=torch.float32)
        pipe.step(batch)
        return [p.grad - 1 - first for p, first in zip(pipe.parameters(), once, strict=True) if p.grad is not None]

    for differences in run_ranks(2, rank):
        assert max(float(difference.abs().max()) for difference in differences if difference is not None) < 1e-6


@pytest.mark.parametrize("dp", [1, 2])
def test_fp16_gradients_that_vanish_without_a_scale_are_there_with_it(dp: int) -> None:
    model = tower(4, dtype=torch.float32)
    batches = [tuple(1e-3 * tensor for tensor in vectors(4, seed=seed)) for seed in range(dp)]
    halves = [tuple(tensor.half() for tensor in batch) for batch in batches]

    def tiny(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return 1e-7 * F.mse_loss(output, target)

    scaled = run_pipeline(model, tiny, [halves], 2, dp, microbatches=2, precision="fp16")
    plain = run_pipeline(model, tiny, [halves], 2, dp, microbatches=2, precision="fp16", loss_scale=LossScale(1.0))
    exact = run_pipeline(model.double(), tiny, [batches], 2, dp, microbatches=2)
    assert scaled.norms[0] == pytest.approx(exact.norms[0], rel=0.02)
    assert plain.norms[0] != pytest.approx(exact.norms[0], rel=0.02)


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("layout", [(4, 1), (2, 2)])
def test_one_bad_gradient_anywhere_skips_the_update_everywhere(layout: tuple[int, int], value: float) -> None:
    pp, dp = layout
    batch = tuple(tensor.half() for tensor in vectors(4))

    def rank(transport: Any) -> tuple[list[bool], list[float], bool]:
        mesh = Mesh.local(pp=pp, dp=dp)
        pipe = Pipeline(tower(4, dtype=torch.float32), F.mse_loss, mesh, microbatches=2, precision="fp16")
        optim = torch.optim.SGD(pipe.parameters(), lr=0.1)
        applied, scales, unchanged = [], [], True
        for step in range(3):
            if step == 1 and transport.rank == 1:
                bad = (batch[0], batch[1].clone().fill_(value)) if pp == 1 else batch
                handle = next(iter(pipe.modules.values())).register_forward_hook(lambda *a: a[-1] * value)
                pipe.step(bad)
                handle.remove()
            else:
                pipe.step(batch)
            before = [p.detach().clone() for p in pipe.parameters()]
            decision = pipe.decide(max_norm=1.0)
            if decision.apply:
                optim.step()
            same = all(torch.equal(p, old) for p, old in zip(pipe.parameters(), before, strict=True))
            unchanged = unchanged and same is not decision.apply
            optim.zero_grad()
            applied.append(decision.apply)
            scales.append(pipe.loss_scale.scale)
        return applied, scales, unchanged

    assert run_ranks(pp * dp, rank) == [([True, False, True], [2.0**16, 2.0**15, 2.0**15], True)] * (pp * dp)


def test_a_bf16_boundary_carries_bf16() -> None:
    seen: list[torch.dtype] = []

    class Look(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.dtype)
            return x

    def rank(transport: Any) -> None:
        model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(Look(), nn.Linear(6, 6)))
        pipe = Pipeline(model, F.mse_loss, Mesh.local(pp=2), microbatches=2, precision="bf16")
        pipe.step(tuple(tensor.bfloat16() for tensor in vectors(4)))

    run_ranks(2, rank)
    assert set(seen) == {torch.bfloat16}


def test_the_loss_is_computed_in_float32_where_a_half_precision_is_asked_for() -> None:
    seen: list[torch.dtype] = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.extend((output.dtype, target.dtype))
        return F.mse_loss(output, target)

    pipe = Pipeline(tower(4), loss, Mesh.local(), microbatches=2, dtype=torch.bfloat16)
    result = pipe.step(tuple(tensor.bfloat16() for tensor in vectors(4)))
    assert set(seen) == {torch.float32}
    assert float(torch.tensor(result.loss).bfloat16()) != result.loss


def test_memory_of_the_partition_counts_the_precisions_bytes() -> None:
    def numbers(**options: Any) -> list[int]:
        pipe = Pipeline(tower(4), F.mse_loss, Mesh.local(), **options)
        return [sum(spec.nbytes for block in pipe.graph.blocks for spec in block.parameters), pipe.graph.numel]

    (wide, count), (half, same) = numbers(precision="fp32"), numbers(precision="bf16")
    assert (wide, half, count) == (4 * count, 2 * count, same)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "int8"}, "none of fp32"),
        ({"precision": "bf16", "dtype": torch.float32}, "contradicts"),
        ({"loss_scale": 1024.0}, "is no LossScale"),
    ],
)
def test_impossible_precisions_are_refused_on_every_rank(options: dict[str, Any], words: str) -> None:
    def rank(transport: Any) -> None:
        with pytest.raises(ConfigError, match=words):
            Pipeline(tower(4), F.mse_loss, Mesh.local(pp=2), **options)

    run_ranks(2, rank)


def test_ranks_with_other_loss_scales_refuse_the_step() -> None:
    def rank(transport: Any) -> None:
        pipe = Pipeline(tower(4), F.mse_loss, Mesh.local(pp=2), microbatches=2, precision="fp16")
        if transport.rank:
            pipe.loss_scale.scale = 4.0
        with pytest.raises(Exception, match="loss scale"):
            pipe.step(tuple(tensor.half() for tensor in vectors(4)))

    run_ranks(2, rank)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_training_with_masters_is_bitwise_one_rank(schedule: str) -> None:
    model, batch = gpt(torch.float32, layers=5, sequence=8, dropout=0.1), tokens(4, 8)

    def weights(pp: int) -> dict[str, torch.Tensor]:
        copies = [copy.deepcopy(model) for _ in range(pp)]

        def rank(transport: Any) -> dict[str, torch.Tensor]:
            name = schedule if pp > 1 else "gpipe"
            pipe = Pipeline(
                copies[transport.rank],
                CausalLMLoss(),
                Mesh.local(pp=pp),
                schedule=name,
                microbatches=4,
                precision="bf16",
            )
            optim = ZeroAdamW(pipe, lr=1e-3, clip=1.0)
            for _ in range(3):
                pipe.step(batch)
                optim.step()
                optim.zero_grad()
            return {name: p.detach().clone() for name, p in pipe.named_parameters()}

        return {name: weight for found in run_ranks(pp, rank) for name, weight in found.items()}

    one, four = weights(1), weights(4)
    assert one.keys() == four.keys()
    assert all(torch.equal(one[name], four[name]) for name in one if name != "embedding.weight")
    torch.testing.assert_close(one["embedding.weight"], four["embedding.weight"], rtol=0.02, atol=2e-3)  # tied


@pytest.mark.parametrize("early", [False, True])
def test_an_overflow_in_one_replica_leaves_weights_moments_and_count_as_they_are(early: bool) -> None:
    batch = tuple(tensor.half() for tensor in vectors(4))

    def rank(transport: Any) -> tuple[list[float], bool, bool]:
        mesh = Mesh.local(pp=2, dp=2)
        pipe = Pipeline(tower(4, dtype=torch.float32), F.mse_loss, mesh, microbatches=2, precision="fp16")
        optim = ZeroAdamW(pipe, lr=1e-2, zero=1, early=early)

        def step(bad: bool = False) -> str:
            hook = next(iter(pipe.modules.values())).register_forward_hook(lambda *a: a[-1] * math.inf) if bad else None
            pipe.step(batch)
            if hook:
                hook.remove()
            optim.step()
            optim.zero_grad()
            return repr([p.detach().tolist() for p in pipe.parameters()]) + repr(optim.state_dict())

        first, scales = step(), [pipe.loss_scale.scale]
        second = step(bad=transport.rank == 3)
        scales.append(pipe.loss_scale.scale)
        third = step()
        return scales, first == second, second == third

    assert run_ranks(4, rank) == [([2.0**16, 2.0**15], True, False)] * 4
