"""Layers that ranks share compute, forward and backward, what the whole layer computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from pipert.comm.local import run_ranks
from pipert.comm.local_transport import LocalTransport
from pipert.errors import BatchError, ConfigError
from pipert.layers import (
    Attention,
    ColumnParallelLinear,
    FeedForward,
    Linear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    materialise,
    shard_of,
    vocab_parallel_cross_entropy,
)
from pipert.layers.collectives import (
    all_gather,
    all_reduce,
    copy_to_ranks,
    gather_shared,
    own_part,
    reduce_scatter,
    scatter,
)
from pipert.layers.shard import gather_full, is_partial

Layer = Callable[..., nn.Module]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- collectives ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_collectives_and_their_gradients_are_those_of_one_process(size: int, dim: int) -> None:
    shape = [4, 4, 4]
    shape[dim] = 2 * size
    wholes = [numbers(*shape, seed=rank) for rank in range(size)]
    gradient = numbers(*shape, seed=9)

    def rank(group: LocalTransport) -> None:
        def back(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, of: torch.Tensor) -> Any:
            leaf = x.clone().requires_grad_()
            result = function(leaf)
            (found,) = torch.autograd.grad(result, leaf, of)
            return result.detach(), found

        whole, part = wholes[group.rank], own_part(wholes[0], dim, group)
        total, own = sum(wholes), own_part(gradient, dim, group)
        # each rank's gradient of a whole that it uses differently, and their sum
        others = [gradient * (1 + r) for r in range(size)]
        summed = sum(others)
        expected = {
            copy_to_ranks: (lambda x: copy_to_ranks(x, group), wholes[0], others[group.rank], wholes[0], summed),
            all_reduce: (lambda x: all_reduce(x, group), whole, gradient, total, gradient),
            all_gather: (lambda x: all_gather(x, dim, group), part, gradient, wholes[0], own),
            gather_shared: (
                lambda x: gather_shared(x, dim, group),
                part,
                others[group.rank],
                wholes[0],
                own_part(summed, dim, group),
            ),
            scatter: (lambda x: scatter(x, dim, group), wholes[0], own, part, gradient),
            reduce_scatter: (
                lambda x: reduce_scatter(x, dim, group),
                whole,
                own,
                own_part(total, dim, group),
                gradient,
            ),
        }
        for function, (call, x, of, result, found) in expected.items():
            got, grad = back(call, x, of)
            torch.testing.assert_close(got, result, msg=function.__name__)
            torch.testing.assert_close(grad, found, msg=f"gradient of {function.__name__}")

    run_ranks(size, rank)


def test_a_dimension_that_does_not_divide_is_refused() -> None:
    def rank(group: LocalTransport) -> None:
        with pytest.raises(ConfigError, match="5 / 2 leaves 1 over"):
            scatter(torch.ones(2, 5), 1, group)

    run_ranks(2, rank)


# ---- layers ---------------------------------------------------------------------------------------------------------

LAYERS: dict[str, tuple[Layer, tuple[int, ...]]] = {
    "column, gathered": (lambda **o: ColumnParallelLinear(6, 8, gather_output=True, **o), (3, 4, 6)),
    "row, scattered": (lambda **o: RowParallelLinear(8, 6, scatter_input=True, **o), (3, 4, 8)),
    "attention": (lambda **o: Attention(16, 4, rotary_base=100.0, **o), (3, 4, 16)),
    "attention, 2 kv heads": (lambda **o: Attention(16, 4, kv_heads=2, **o), (3, 4, 16)),
    "attention, 1 kv head": (lambda **o: Attention(16, 4, kv_heads=1, bias=False, **o), (3, 4, 16)),
    "gelu": (lambda **o: FeedForward(6, 8, **o), (3, 4, 6)),
    "swiglu": (lambda **o: FeedForward(6, 8, activation="swiglu", bias=False, **o), (3, 4, 6)),
    "head": (lambda **o: VocabParallelHead(6, 11, **o), (3, 4, 6)),
}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_and_their_gradients_are_the_whole_layers(name: str, size: int, sequence: bool, overlap: bool) -> None:
    make, shape = LAYERS[name]
    if sequence and name in ("column, gathered", "row, scattered"):
        return
    x = numbers(*shape)
    whole = materialise(_meta(make), "layer", dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    y = whole(leaf)
    gradient = numbers(*y.shape, seed=1)
    y.backward(gradient)

    def rank(group: LocalTransport) -> None:
        options: dict[str, Any] = {"group": group}
        if name != "row, scattered":
            options["overlap"] = overlap
        if sequence:
            options["sequence_dim"] = 1
        layer = materialise(_meta(make, **options), "layer", dtype=torch.float64)
        mine = (own_part(x, 1, group) if sequence else x).clone().requires_grad_()
        result = layer(mine)
        parts = sequence and name != "head"
        result.backward(own_part(gradient, 1, group) if parts else gradient)
        torch.testing.assert_close(result, own_part(y, 1, group) if parts else y)
        assert leaf.grad is not None
        torch.testing.assert_close(mine.grad, own_part(leaf.grad, 1, group) if sequence else leaf.grad)
        assert_parameters(layer, whole, group)

    run_ranks(size, rank)


def _meta(make: Layer, **options: Any) -> nn.Module:
    with torch.device("meta"):
        return make(**options)


def assert_parameters(layer: nn.Module, whole: nn.Module, group: LocalTransport) -> None:
    """Values bitwise, gradients to rounding; those that ranks find parts of are summed as the engine does."""
    from pipert.engine.partial import sum_partial

    sum_partial(layer.parameters(), group)
    wholes = dict(whole.named_parameters())
    for name, parameter in layer.named_parameters():
        shard, wanted = shard_of(parameter), wholes[name]
        value, grad = parameter.detach(), parameter.grad
        assert grad is not None
        if shard is not None:
            value, grad = gather_full(value, shard, group), gather_full(grad, shard, group)
        assert torch.equal(value, wanted.detach()), name
        torch.testing.assert_close(grad, wanted.grad, msg=lambda text: f"{name}: {text}")  # noqa: B023


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(("vocabulary", "size"), [(61, 2), (61, 4), (8, 2), (5, 4)])
def test_an_embedding_has_the_whole_ones_rows_bitwise(vocabulary: int, size: int, sequence: bool) -> None:
    ids = torch.randint(vocabulary, (3, 4), generator=torch.Generator().manual_seed(0))
    ids[0, 0], ids[0, 1] = 0, vocabulary - 1
    whole = materialise(_meta(lambda: VocabParallelEmbedding(vocabulary, 6)), "e")
    y = whole(ids)
    gradient = numbers(*y.shape).float()
    y.backward(gradient)

    def rank(group: LocalTransport) -> None:
        dim = 1 if sequence else None
        layer = materialise(_meta(lambda: VocabParallelEmbedding(vocabulary, 6, group=group, sequence_dim=dim)), "e")
        result = layer(ids)
        result.backward(own_part(gradient, 1, group) if sequence else gradient)
        assert torch.equal(result, own_part(y, 1, group) if sequence else y)
        assert_parameters(layer, whole, group)
        for wrong in (-1, vocabulary, vocabulary + 1):
            with pytest.raises(BatchError, match=rf"token id {wrong} in a vocabulary of {vocabulary}"):
                layer(torch.full((1, 4), wrong))

    run_ranks(size, rank)


@pytest.mark.parametrize("size", [2, 4])
def test_ids_that_are_padding_never_win(size: int) -> None:
    def rank(group: LocalTransport) -> torch.Tensor:
        head = materialise(_meta(lambda: VocabParallelHead(6, 61, group=group, gather_output=False)), "head")
        return head(-numbers(3, 6).float().abs()).detach()

    logits = torch.cat(run_ranks(size, rank), dim=-1)
    assert logits.shape[-1] > 61
    probability = torch.softmax(logits, dim=-1)
    assert (probability[:, 61:] == 0).all()
    assert (probability[:, :61] > 0).all()


def test_a_layer_copied_deeply_still_talks_to_the_same_ranks() -> None:
    def rank(group: LocalTransport) -> bool:
        layer = copy.deepcopy(FeedForward(4, 8, group=group))
        return layer.up.group is group and torch.isfinite(layer(torch.ones(1, 4))).all().item() is True

    assert all(run_ranks(2, rank))


def test_biases_behind_a_shared_out_sequence_are_summed_later_and_others_are_not() -> None:
    def rank(group: LocalTransport) -> None:
        assert is_partial(FeedForward(4, 8, group=group, sequence_dim=1).down.bias)
        assert not is_partial(FeedForward(4, 8, group=group).down.bias)

    run_ranks(2, rank)


def test_bytes_are_those_of_the_docstring() -> None:
    def rank(group: LocalTransport) -> dict[str, int]:
        layer = FeedForward(16, 32, group=group)
        x = torch.ones(2, 3, 16, requires_grad=True)
        layer(x).sum().backward()
        own = torch.ones(2, 2, 16, requires_grad=True)
        FeedForward(16, 32, group=group, sequence_dim=1)(own).sum().backward()
        return dict(group.counters.bytes)

    s, t = 2 * 3 * 16 * 4, 2 * 4 * 16 * 4
    assert run_ranks(2, rank) == [{"allreduce": 2 * s, "allgather": 3 * t, "reduce_scatter": 2 * t}] * 2


# ---- the loss -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [0.0, 1000.0, -1000.0])
@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_loss_of_shared_out_logits_is_that_of_whole_ones(
    size: int, smoothing: float, z_loss: float, shift: float
) -> None:
    vocabulary = 61
    targets = torch.tensor([[0, vocabulary // 2 - 1, vocabulary // 2], [vocabulary - 1, -100, 17]])
    logits = (numbers(2, 3, vocabulary) + shift).requires_grad_()
    losses = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none", label_smoothing=smoothing, ignore_index=-100
    ).view(2, 3)
    losses = losses + z_loss * logits.logsumexp(-1).square() * (targets != -100)
    weight = numbers(2, 3, seed=1)
    (wanted,) = torch.autograd.grad(losses, logits, weight)
    padded = -(-vocabulary // size)

    def rank(group: LocalTransport) -> tuple[torch.Tensor, torch.Tensor]:
        whole = F.pad(logits.detach(), (0, padded * size - vocabulary), value=float("-inf"))
        own = whole[..., group.rank * padded : (group.rank + 1) * padded].clone().requires_grad_()
        got = vocab_parallel_cross_entropy(
            own, targets, vocabulary=vocabulary, group=group, smoothing=smoothing, z_loss=z_loss
        )
        (grad,) = torch.autograd.grad(got, own, weight)
        return got.detach(), grad

    outcomes = run_ranks(size, rank)
    for got, _ in outcomes:
        assert torch.equal(got, outcomes[0][0])
        torch.testing.assert_close(got, losses.detach(), rtol=1e-10, atol=1e-10)
    gradient = torch.cat([grad for _, grad in outcomes], dim=-1)
    assert (gradient[..., vocabulary:] == 0).all()
    torch.testing.assert_close(gradient[..., :vocabulary], wanted, rtol=1e-10, atol=1e-12)


@given(st.integers(2, 9), st.integers(1, 5))
def test_the_loss_works_where_ranks_have_padding_alone(vocabulary: int, size: int) -> None:
    logits, targets = numbers(3, vocabulary), torch.tensor([0, vocabulary - 1, -100])
    padded = -(-vocabulary // size)
    wanted = F.cross_entropy(logits, targets, reduction="none")

    def rank(group: LocalTransport) -> torch.Tensor:
        whole = F.pad(logits, (0, padded * size - vocabulary))
        own = whole[:, group.rank * padded : (group.rank + 1) * padded].clone().requires_grad_()
        losses = vocab_parallel_cross_entropy(own, targets, vocabulary=vocabulary, group=group)
        losses.sum().backward()
        return losses.detach()

    for got in run_ranks(size, rank):
        torch.testing.assert_close(got, wanted)


def test_losses_that_cannot_be_are_refused() -> None:
    logits = torch.zeros(2, 5)
    with pytest.raises(BatchError, match="target 5 in a vocabulary of 5"):
        vocab_parallel_cross_entropy(logits, torch.tensor([0, 5]), vocabulary=5)
    with pytest.raises(ConfigError, match=r"smoothing 1\.5"):
        vocab_parallel_cross_entropy(logits, torch.tensor([0, 4]), vocabulary=5, smoothing=1.5)
    with pytest.raises(ConfigError, match="logits of 5 ids on a rank, but a vocabulary of 6 on 1 ranks makes 6"):
        vocab_parallel_cross_entropy(logits, torch.tensor([0, 4]), vocabulary=6)


# ---- what cannot be shared out --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda g: ColumnParallelLinear(4, 7, group=g), "7 rows of 7 units .* among tp = 3 ranks: 7 / 3 leaves 1 over"),
        (lambda g: RowParallelLinear(8, 4, group=g), "8 rows of 8 units .* 8 / 3 leaves 2 over"),
        (lambda g: Attention(32, 8, kv_heads=2, group=g), "among tp = 3 ranks: 8 / 3 leaves 2 over; use a tp that"),
        (lambda g: FeedForward(4, 8, activation="swiglu", group=g), "8 / 3 leaves 2 over"),
    ],
)
def test_layers_that_cannot_be_shared_out_are_refused_before_anything_is_allocated(make: Any, words: str) -> None:
    def rank(group: LocalTransport) -> None:
        with pytest.raises(ConfigError, match=words):
            make(group)

    run_ranks(3, rank)


def test_a_layer_alone_is_a_linear_layer() -> None:
    layer = ColumnParallelLinear(4, 6)
    assert isinstance(layer, Linear)
    assert shard_of(layer.weight) is None
    x = torch.ones(2, 4)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
