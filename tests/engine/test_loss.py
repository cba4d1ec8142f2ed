"""The loss weighs what it counts, and scale does not depend on how a batch is cut."""

from __future__ import annotations

import copy
import math
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipert.comm.local import run_ranks
from pipert.comm.mesh import Mesh
from pipert.engine.loss import default_count
from pipert.engine.pipeline import Pipeline
from pipert.engine.reference import reference_step
from pipert.errors import BatchError, ConfigError
from tests.engine.world import (
    ADAMW,
    Outcome,
    assert_same,
    gpt,
    merge,
    parts,
    run_pipeline,
    run_plain,
    token_loss,
    tokens,
    tower,
    vectors,
)


@pytest.mark.parametrize(("microbatches", "dp"), [(1, 1), (4, 1), (16, 1), (2, 2), (4, 4)])
def test_gradients_and_norm_do_not_depend_on_how_a_batch_of_16_is_cut(microbatches: int, dp: int) -> None:
    model, batch = tower(4), vectors(16)
    replicas = list(zip(batch[0].chunk(dp), batch[1].chunk(dp), strict=True))
    mine = run_pipeline(model, F.mse_loss, [replicas], 2, dp, microbatches=microbatches)
    wanted = run_plain(model, F.mse_loss, [[[batch]]])
    assert mine.norms[0] == pytest.approx(wanted.norms[0], rel=1e-12)
    for name, gradient in wanted.gradients.items():
        torch.testing.assert_close(mine.gradients[name], gradient, rtol=1e-10, atol=1e-12)


def test_three_steps_and_one_update_are_one_accumulation() -> None:
    model = tower(4)
    batches = [vectors(4, seed=seed) for seed in range(3)]
    mine = run_pipeline(model, F.mse_loss, [[batch] for batch in batches], 2, microbatches=4)
    assert_same(mine, run_plain(model, F.mse_loss, [[parts(batch, 4)] for batch in batches]), 0)


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_that_were_there_before_are_added_to_and_neither_scaled_nor_reduced(dp: int, tied: bool) -> None:
    model = gpt(tied=tied, layers=2)
    replicas = [tokens(2, seed=seed) for seed in range(dp)]

    def ones(pipe: Pipeline) -> None:
        for parameter in pipe.parameters():
            parameter.grad = torch.ones_like(parameter)

    mine = run_pipeline(model, token_loss, [replicas], 2, dp, before=ones, microbatches=2)
    plain = run_plain(model, token_loss, [[parts(batch, 2) for batch in replicas]])
    for name, gradient in plain.gradients.items():
        assert gradient is not None
        torch.testing.assert_close(mine.gradients[name], gradient + 1, rtol=1e-10, atol=1e-12)


class Spelled(nn.Module):
    """Logits that are the parameter itself, so that losses can be chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


def chosen(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean of the outputs whose target is not ignored."""
    return output[target != -100].mean()


def chosen_batch(loss: float, valid: int, length: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    target = torch.full((1, length), -100)
    target[0, :valid] = 1
    return torch.full((1, length), loss, dtype=torch.float64), target


@pytest.mark.parametrize("over", ["replicas", "microbatches"])
def test_every_token_weighs_the_same(over: str) -> None:
    model = nn.Sequential(Spelled(), nn.Identity())
    many, one = chosen_batch(1.0, 5), chosen_batch(7.0, 1)
    if over == "replicas":
        mine = run_pipeline(model, chosen, [[many, one]], 2, 2, microbatches=1)
    else:
        mine = run_pipeline(model, chosen, [[[many, one]]], 2)
    assert mine.results[0].loss == pytest.approx(2.0)
    assert mine.results[0].tokens == 6
    assert float(mine.gradients["0.weight"]) == pytest.approx(1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("dp", [1, 2])
def test_a_microbatch_that_is_all_ignored_is_finite_and_adds_nothing(dp: int) -> None:
    model = gpt(layers=2, tied=False)
    full, ignored = tokens(2), (tokens(2, seed=1)[0], torch.full((2, 16), -100))
    batch = [full, ignored, tokens(1, seed=2)]
    mine = run_pipeline(model, token_loss, [[batch] + [[ignored]] * (dp - 1)], 2, dp)
    plain = run_plain(model, token_loss, [[batch] + [[ignored]] * (dp - 1)])
    assert math.isfinite(mine.results[0].loss)
    assert_same(mine, plain, 0 if dp == 1 else 1e-10)


@pytest.mark.parametrize("dp", [1, 2])
def test_a_batch_that_is_all_ignored_gives_zero_gradients_and_a_warning(dp: int) -> None:
    model = gpt(layers=2, tied=True)
    ignored = tokens(2)[0], torch.full((2, 16), -100)
    with pytest.warns(UserWarning, match=r"counts nothing in the whole batch \(\d samples"):
        mine = run_pipeline(model, token_loss, [[ignored] * dp], 2, dp, microbatches=2)
    assert mine.results[0].loss == 0.0
    assert all(torch.equal(g, torch.zeros_like(g)) for g in mine.gradients.values() if g is not None)
    assert None not in mine.gradients.values()


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_every_rank_shows_the_true_loss(pp: int) -> None:
    model, batch = gpt(layers=4), tokens(4)
    mine = run_pipeline(model, token_loss, [[batch]], pp, microbatches=4)  # merge compares the ranks
    with torch.no_grad():
        assert mine.results[0].loss == pytest.approx(float(token_loss(model(batch[0]), batch[1])), rel=1e-12)


def test_a_count_of_ones_own_decides_the_weights() -> None:
    model = tower(3)
    batch = [vectors(1), vectors(3, seed=1)]

    def count(target: torch.Tensor) -> float:
        return 3.0 * len(target) if len(target) == 1 else float(len(target))

    mine = run_pipeline(model, F.mse_loss, [[batch]], 2, count_fn=count)
    assert_same(mine, run_plain(model, F.mse_loss, [[batch]], count=count), 0)


def test_what_a_loss_ignores_is_asked_of_the_loss() -> None:
    class Loss:
        ignore_index = 3

        def __call__(self, output: Any, target: Any) -> torch.Tensor:
            raise NotImplementedError

    assert default_count(Loss())(torch.tensor([1, 3, -100])) == 2
    assert default_count(F.mse_loss)(torch.ones(2, 3)) == 6
    with pytest.raises(BatchError, match="the targets hold 2 tensors"):
        default_count(F.mse_loss)((torch.ones(1), torch.ones(1)))


def test_targets_may_be_missing_altogether_then_samples_count() -> None:
    def norm(output: torch.Tensor, target: None) -> torch.Tensor:
        return output.square().sum(-1).mean()

    model, (x, _) = tower(2), vectors(5)
    mine = run_pipeline(model, norm, [[(x, None)]], 2, microbatches=2)
    assert mine.results[0].tokens == 5
    wanted = copy.deepcopy(model)
    norm(wanted(x), None).backward()
    for name, parameter in wanted.named_parameters():
        torch.testing.assert_close(mine.gradients[name], parameter.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("loss", "count", "error", "words"),
    [
        (lambda o, t: (o - t).square(), None, BatchError, r"loss_fn returned a tensor of shape \[2, 6\]"),
        (lambda o, t: 1.0, None, BatchError, "loss_fn returned float; it must return a scalar tensor"),
        (lambda o, t: o.detach().mean(), None, ConfigError, "depends on no trainable parameter"),
        (F.mse_loss, lambda t: math.inf, BatchError, "micro-batch 0 counts inf"),
        (F.mse_loss, lambda t: -1, BatchError, "micro-batch 0 counts -1"),
    ],
)
def test_losses_and_counts_that_make_no_sense_are_refused(loss: Any, count: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        run_pipeline(tower(2), loss, [[vectors(4)]], 2, microbatches=2, count_fn=count)


@pytest.mark.parametrize("dp", [1, 2])
def test_the_reference_run_is_plain_torch(dp: int) -> None:
    model = gpt(layers=2)
    steps = [[tokens(3, seed=10 * step + replica) for replica in range(dp)] for step in range(2)]
    mine, ours = Outcome(), copy.deepcopy(model)
    optim = ADAMW(ours.parameters())
    for number, (batch, *others) in enumerate(steps):
        optim.zero_grad()
        mine.results.append(reference_step(ours, token_loss, batch, 2, replicas=others, step=number))
        optim.step()
    mine.gradients = {name: p.grad for name, p in ours.named_parameters()}
    mine.weights = {name: p.detach() for name, p in ours.named_parameters()}
    plain = run_plain(model, token_loss, [[parts(b, 2) for b in step] for step in steps], optimizer=ADAMW)
    assert_same(merge([mine]), plain, 0)


class Exact(nn.Module):
    """A block that leaves autocast for a product in full precision, and so must its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 36).view(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return x.float() @ self.weight.float()


def test_a_step_under_autocast_is_one_process_under_autocast() -> None:
    model = nn.Sequential(tower(3), Exact(), tower(2)).float()
    batch = tuple(tensor.float() for tensor in vectors(4))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output.float(), target)

    def rank(transport: Any) -> Outcome:
        pipe = Pipeline(copy.deepcopy(model), loss, Mesh.local(pp=2), microbatches=2)
        outcome = Outcome([pipe.step(batch)])
        with torch.autocast("cpu", torch.bfloat16):
            outcome.results.append(pipe.step(batch))
        outcome.gradients = {name: p.grad for name, p in pipe.named_parameters()}
        return outcome

    mine, plain = merge(run_ranks(2, rank)), copy.deepcopy(model)
    for low in (False, True):
        for x, y in parts(batch, 2):  # type: ignore[arg-type]
            with torch.autocast("cpu", torch.bfloat16, enabled=low):
                weighted = loss(plain(x), y) * 0.5
            weighted.backward()
    assert mine.results[0].loss != mine.results[1].loss
    for name, parameter in plain.named_parameters():
        assert torch.equal(mine.gradients[name], parameter.grad), name  # type: ignore[arg-type]


def test_warnings_are_not_raised_for_ordinary_batches() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_pipeline(tower(2), F.mse_loss, [[vectors(4)]], 2, microbatches=2)


class Wrapped(nn.Module):
    """A loss of the user's own around one of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.CrossEntropyLoss(ignore_index=0)

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.inner(output, target)


CLASS_WEIGHTS = torch.tensor([0.5, 1.0, 4.0, 0.25, 2.0, 0.0], dtype=torch.float64)


@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.CrossEntropyLoss(weight=CLASS_WEIGHTS),
        nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, ignore_index=0, label_smoothing=0.1),
        nn.NLLLoss(weight=CLASS_WEIGHTS, ignore_index=2),
        partial(F.cross_entropy, ignore_index=0),
        partial(F.cross_entropy, weight=CLASS_WEIGHTS),
        partial(nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)),
        Wrapped(),
    ],
    ids=["weights", "weights, ignored, smoothed", "nll", "partial ignored", "partial weights", "partial", "wrapped"],
)
def test_class_weights_and_ignored_classes_give_the_mean_of_the_whole_batch(loss_fn: Any) -> None:
    model, (inputs, _) = tower(4), vectors(8)
    target = torch.tensor([0, 0, 0, 1, 2, 2, 5, 3])
    mine = run_pipeline(model, loss_fn, [[(inputs, target)]], 2, microbatches=4)
    wanted = loss_fn(model(inputs), target)
    wanted.backward()
    assert mine.results[0].loss == pytest.approx(wanted.item(), rel=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(mine.gradients[name], parameter.grad, rtol=1e-10, atol=1e-12)


def test_a_mean_over_the_batch_counts_samples() -> None:
    count = default_count(nn.KLDivLoss(reduction="batchmean"))
    assert count(torch.rand(5, 7)) == 5
    assert default_count(nn.KLDivLoss())(torch.rand(5, 7)) == 35


@pytest.mark.parametrize("loss_fn", [nn.MSELoss(reduction="sum"), partial(F.mse_loss, reduction="sum")])
def test_a_sum_is_refused_where_a_mean_is_weighed(loss_fn: Any) -> None:
    with pytest.raises(ConfigError, match=r'reduction = "sum".*use reduction="mean"'):
        run_pipeline(tower(2), loss_fn, [[vectors(4)]], 2, microbatches=2)


@pytest.mark.parametrize("count", [None, "x", torch.ones(2), [3]])
def test_a_count_that_is_no_number_is_refused(count: Any) -> None:
    with pytest.raises(BatchError, match=r"count_fn returned .*; a count must be a finite number >= 0"):
        run_pipeline(tower(2), F.mse_loss, [[vectors(4)]], 2, microbatches=2, count_fn=lambda target: count)
