"""Batches of any size and shape, pulled where they are needed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from pipert.comm.local import run_ranks
from pipert.comm.mesh import Mesh
from pipert.engine.batch import INPUTS, TARGETS, samples, split
from pipert.engine.pipeline import Pipeline
from pipert.errors import BatchError, EndOfData
from tests.engine.world import (
    ADAMW,
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


def test_a_batch_is_split_as_tensor_split_does() -> None:
    inputs, targets = vectors(8)
    assert [len(part) for part in split((inputs, targets), INPUTS, 3)] == [3, 3, 2]
    assert torch.equal(torch.cat(split((inputs, targets), TARGETS, 3)), targets)
    assert len(split((inputs[:2], targets[:2]), INPUTS, 8)) == 2


def test_nested_inputs_are_split_together_and_what_has_no_samples_goes_into_every_part() -> None:
    value = {"x": torch.arange(4), "pair": (torch.ones(4, 2), torch.tensor(7.0)), "empty": torch.ones(0), "n": 3}
    first, second = split((value, None), INPUTS, 2)
    assert first["x"].tolist() == [0, 1]
    assert second["x"].tolist() == [2, 3]
    assert first["pair"][1] is second["pair"][1] is value["pair"][1]  # type: ignore[index]
    assert first["empty"] is value["empty"]
    assert second["n"] == 3
    assert samples(first) == 2


@pytest.mark.parametrize("second", [list, tuple])
def test_two_lists_of_two_that_may_be_a_pair_or_two_microbatches_are_refused(second: type) -> None:
    x, y = torch.ones(4), torch.zeros(4)
    with pytest.raises(BatchError, match=r"one pair \(inputs, targets\) or two micro-batches; pass a tuple"):
        split([[x, y], second([x, y])], INPUTS, 2)
    assert len(split([(x, y), (x, y), (x, y)], INPUTS, 2)) == 3
    assert len(split(([x, y], [x, y]), INPUTS, 2)) == 2
    assert len(split([[x, y], x], INPUTS, 2)) == 2


def test_a_list_that_a_loader_makes_of_a_pair_is_a_pair_and_a_list_of_pairs_is_microbatches() -> None:
    x, y = vectors(4)
    assert len(split([x, y], INPUTS, 2)) == 2
    assert [len(part) for part in split([(x[:1], y[:1]), (x[1:], y[1:])], INPUTS, 5)] == [1, 3]


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (None, "not NoneType; only ranks that own neither"),
        (torch.ones(4), "a batch must be a pair"),
        ([], "not an empty list"),
        ((torch.ones(0, 3), torch.ones(0, 3)), "they need at least one sample"),
        (((torch.ones(4), torch.ones(3)), None), r"shapes \[4\], \[3\]; .* the same number of samples"),
        ((torch.ones(4), torch.ones(3)), "there are 4 samples of inputs and 3 of targets in dimension 0"),
        ([[torch.ones(4), torch.ones(4)]] * 3, r"not a list of 3 lists \(make each a tuple"),
        (DataLoader([1, 2]), r"not DataLoader \(pass iter\(\.\.\.\) of it"),
        (({1, 2}, None), "the inputs cannot be split into micro-batches: a builtins.set"),
    ],
)
def test_a_batch_that_cannot_be_split_is_refused(batch: Any, words: str) -> None:
    with pytest.raises(BatchError, match=words):
        split(batch, INPUTS, 2)


def test_unequal_microbatches_of_a_mean_loss_are_weighted_by_their_size() -> None:
    model, batch = tower(6), vectors(8)
    mine = run_pipeline(model, F.mse_loss, [[batch]], 3, microbatches=3)
    plain = run_plain(model, F.mse_loss, [[[batch]]])
    plain.results = [replace(plain.results[0], microbatches=3)]
    assert_same(mine, plain)


def test_lengths_change_from_step_to_step_and_within_one() -> None:
    model = gpt(layers=3, sequence=17)
    steps: list[Any] = [tokens(4, length) for length in (16, 17, 9, 16)]
    steps.append([tokens(2, length, seed=length) for length in (16, 17, 9, 16)])
    plain = [[parts(step, 2)] if isinstance(step, tuple) else [step] for step in steps]
    mine = run_pipeline(model, token_loss, [[step] for step in steps], 3, microbatches=2)
    assert_same(mine, run_plain(model, token_loss, plain))


class Untouchable:
    """An iterator that raises when touched."""

    def __iter__(self) -> Untouchable:
        raise AssertionError("touched")

    __next__ = __iter__  # type: ignore[assignment]


def test_only_the_ends_of_the_pipeline_pull_data() -> None:
    model, batches = tower(8), [vectors(4, seed=step) for step in range(3)]
    copies = [copy.deepcopy(model) for _ in range(4)]

    def rank(transport: Any) -> list[float]:
        pipe = Pipeline(copies[transport.rank], F.mse_loss, Mesh.local(pp=4), microbatches=2)
        source: Any = Untouchable()
        if transport.rank == 0:
            source = iter([(x, Untouchable()) for x, _ in batches])  # targets stay untouched here
        elif transport.rank == 3:
            source = iter([(Untouchable(), y) for _, y in batches])
        losses = [pipe.step(source).loss for _ in batches]
        with pytest.raises(EndOfData, match="rank 0: the data iterator is exhausted"):
            pipe.step(source)
        return losses

    losses = run_ranks(4, rank)
    assert losses == [losses[0]] * 4
    wanted = run_plain(model, F.mse_loss, [[parts(batch, 2)] for batch in batches])
    assert losses[0] == [result.loss for result in wanted.results]


def test_after_the_end_of_data_the_pipeline_goes_on_with_the_next_epoch() -> None:
    model, batch = tower(2), vectors(4)

    def rank(transport: Any) -> int:
        pipe = Pipeline(copy.deepcopy(model), F.mse_loss, Mesh.local(pp=2), microbatches=2)
        steps = 0
        for _ in range(2):
            epoch: Iterator[Any] = iter([batch, batch])
            while True:
                try:
                    pipe.step(epoch)
                except EndOfData:
                    break
                steps += 1
        return steps

    assert run_ranks(2, rank) == [4, 4]


def test_one_rank_needs_no_other() -> None:
    model, batch = tower(3), vectors(5)
    pipe = Pipeline(copy.deepcopy(model), F.mse_loss, Mesh.local(), microbatches=2)
    result = pipe.step(batch)
    wanted = run_plain(model, F.mse_loss, [[parts(batch, 2)]])
    assert result == wanted.results[0]
    assert all(torch.equal(p.grad, wanted.gradients[n]) for n, p in pipe.named_parameters())  # type: ignore[arg-type]


class TwoInputs(nn.Module):
    """Recorded by torch.fx: a tuple of inputs becomes its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) + shift
        return x


def test_a_model_with_several_arguments_takes_a_tuple_of_inputs() -> None:
    torch.manual_seed(0)
    model = TwoInputs().double()
    (x, y), (shift, _) = vectors(6), vectors(6, seed=1)
    mine = run_pipeline(model, F.mse_loss, [[((x, shift), y)]], 2, microbatches=3)
    plain = run_plain(
        _Unpacked(model), F.mse_loss, [[[((x[i : i + 2], shift[i : i + 2]), y[i : i + 2]) for i in (0, 2, 4)]]]
    )
    plain.gradients = {name.removeprefix("model."): g for name, g in plain.gradients.items()}
    plain.weights = {name.removeprefix("model."): w for name, w in plain.weights.items()}
    assert_same(mine, plain)


class _Unpacked(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, value: Any) -> Any:
        return self.model(*value)


class Skip(nn.Module):
    """Adds the output of block 1 into block 6."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x
        for index, layer in enumerate(self.layers):
            x = layer(x + kept if index == 6 else x)
            if index == 1:
                kept = x
        return x


@pytest.mark.parametrize(("schedule", "chunks", "pp"), [("1f1b", 1, 4), ("gpipe", 1, 2), ("interleaved", 2, 2)])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_skip_edge_over_several_stages_keeps_the_numbers(schedule: str, chunks: int, pp: int, recompute: str) -> None:
    torch.manual_seed(0)
    model, batches = Skip().double(), [vectors(6, seed=seed) for seed in range(3)]
    mine = run_pipeline(
        model,
        F.mse_loss,
        [[batch] for batch in batches],
        pp,
        schedule=schedule,
        chunks=chunks,
        microbatches=3,
        recompute=recompute,
        optimizer=ADAMW,
    )
    assert_same(mine, run_plain(model, F.mse_loss, [[parts(b, 3)] for b in batches], optimizer=ADAMW))
