"""Which tensors get a gradient is learned once, and a parameter without one is left alone, as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from pipert.comm.local import run_ranks
from pipert.comm.mesh import Mesh
from pipert.engine.pipeline import Pipeline
from pipert.errors import BoundaryError
from tests.engine.world import ADAMW, assert_same, parts, run_pipeline, run_plain, vectors

Pair = tuple[torch.Tensor, torch.Tensor]


class Fork(nn.Module):
    """A main value, and one that a layer of its own makes."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.side = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> Pair:
        return self.main(x), self.side(x)


class Through(nn.Module):
    """Works on the main value; what becomes of the other is a function's choice."""

    def __init__(self, side: Callable[[torch.Tensor], torch.Tensor] = lambda side: side) -> None:
        super().__init__()
        self.linear, self.side = nn.Linear(6, 6), side

    def forward(self, pair: Pair) -> Pair:
        return torch.tanh(self.linear(pair[0])), self.side(pair[1])


class Join(nn.Module):
    """The main value, and the other one where a function of it says so."""

    def __init__(self, wanted: Callable[[torch.Tensor], bool] = lambda side: False) -> None:
        super().__init__()
        self.linear, self.wanted = nn.Linear(6, 6), wanted

    def forward(self, values: tuple[torch.Tensor, ...]) -> torch.Tensor:
        main, side, *_ = values
        return self.linear(main + side if self.wanted(side) else main)


def forked(wanted: Callable[[torch.Tensor], bool] = lambda side: False, *, detached: bool = False) -> nn.Sequential:
    """Eight blocks; the side value crosses them all, or is detached in the middle and then used."""
    torch.manual_seed(0)
    middle = Through(torch.detach) if detached else Through()
    return nn.Sequential(Fork(), *(Through() for _ in range(3)), middle, Through(), Through(), Join(wanted)).double()


LAYOUTS = [("gpipe", 1, 4), ("1f1b", 1, 2), ("interleaved", 2, 2), ("zb-h1", 1, 4), ("zb-v", 2, 2)]


@pytest.mark.parametrize("recompute", ["none", "block", "full"])
@pytest.mark.parametrize("detached", [False, True], ids=["unused", "detached"])
@pytest.mark.parametrize(("schedule", "chunks", "pp"), LAYOUTS)
def test_parameters_that_feed_only_an_unused_tensor_are_left_alone(
    schedule: str, chunks: int, pp: int, detached: bool, recompute: str
) -> None:
    model = forked(lambda side: detached, detached=detached)
    steps = [vectors(6, seed=step) for step in range(3)]
    options: dict[str, Any] = {"schedule": schedule, "chunks": chunks, "microbatches": 3, "recompute": recompute}
    mine = run_pipeline(model, F.mse_loss, [[step] for step in steps], pp, optimizer=ADAMW, **options)
    assert_same(mine, run_plain(model, F.mse_loss, [[parts(step, 3)] for step in steps], optimizer=ADAMW), 0)
    assert mine.gradients["0.side.weight"] is None
    assert torch.equal(mine.weights["0.side.weight"], model.get_parameter("0.side.weight"))


def test_a_tensor_that_only_some_micro_batches_use_has_the_gradient_of_those() -> None:
    model = forked(lambda side: bool(side.shape[0] == 3))
    steps = [vectors(8, seed=step) for step in range(3)]  # micro-batches of 3, 3, 2
    mine = run_pipeline(model, F.mse_loss, [[step] for step in steps], 4, optimizer=ADAMW, microbatches=3)
    assert_same(mine, run_plain(model, F.mse_loss, [[parts(step, 3)] for step in steps], optimizer=ADAMW), 0)


def test_no_bytes_flow_back_for_it_once_that_is_known() -> None:
    def sent(wanted: bool) -> list[int]:
        copies = [forked(lambda side: wanted) for _ in range(2)]

        def rank(transport: Any) -> list[int]:
            pipe = Pipeline(copies[transport.rank], F.mse_loss, Mesh.local(pp=2), microbatches=2)
            counted = []
            for _ in range(3):
                before = pipe.mesh.pp_group.counters.bytes["send"]  # type: ignore[attr-defined]
                pipe.step(vectors(4))
                counted.append(pipe.mesh.pp_group.counters.bytes["send"] - before)  # type: ignore[attr-defined]
            return counted

        return run_ranks(2, rank)[1]

    one = 2 * 6 * 8  # a micro-batch of 2 samples of 6 numbers in float64
    assert sent(True) == [2 * (2 * one + 2), 2 * 2 * one, 2 * 2 * one]
    assert sent(False) == [2 * (2 * one + 2), 2 * one, 2 * one]


def test_what_is_used_is_learned_for_each_pattern_of_frozen_parameters() -> None:
    frozen_last = False  # the last block uses the side value only while it is trained itself
    model = forked(lambda side: not frozen_last)
    copies = [copy.deepcopy(model) for _ in range(4)]
    plain = copy.deepcopy(model)
    batch = vectors(4)

    def rank(transport: Any) -> None:
        nonlocal frozen_last
        pipe = Pipeline(copies[transport.rank], F.mse_loss, Mesh.local(pp=4), microbatches=2)
        for frozen in (False, True, False, True):
            pipe.mesh.world.barrier()
            frozen_last = frozen
            pipe.mesh.world.barrier()
            copies[transport.rank][7].requires_grad_(not frozen)
            pipe.step(batch)

    run_ranks(4, rank)
    for frozen in (False, True, False, True):
        frozen_last = frozen
        plain[7].requires_grad_(not frozen)
        for inputs, targets in parts(batch, 2):
            (F.mse_loss(plain(inputs), targets) / 2).backward()
    wanted = dict(plain.named_parameters())
    for index, copied in enumerate(copies):
        for name, parameter in copied.named_parameters():
            if int(name[0]) // 2 == index:
                assert torch.equal(parameter.grad, wanted[name].grad), name


def test_a_micro_batch_that_counts_nothing_teaches_nothing() -> None:
    model = forked(lambda side: True)
    nothing, some = [torch.full((4,), value) for value in (-100, 3)]
    steps = [[(vectors(4)[0], nothing), (vectors(4, seed=1)[0], targets)] for targets in (nothing, some, some)]
    with pytest.warns(UserWarning, match="the loss counts nothing"):
        mine = run_pipeline(model, F.cross_entropy, [[step] for step in steps], 4)
    plain = run_plain(model, F.cross_entropy, [[step] for step in steps[1:]])
    for name, gradient in plain.gradients.items():
        assert gradient is not None
        assert torch.equal(mine.gradients[name], gradient), name


def test_an_evaluation_between_two_steps_teaches_nothing() -> None:
    copies = [forked() for _ in range(2)]

    def rank(transport: Any) -> None:
        pipe = Pipeline(copies[transport.rank], F.mse_loss, Mesh.local(pp=2), microbatches=2)
        for evaluate in (True, False, True, False):
            (pipe.eval_step if evaluate else pipe.step)(vectors(4))

    run_ranks(2, rank)
    assert copies[0].get_parameter("0.side.weight").grad is None
    assert copies[0].get_parameter("0.main.weight").grad is not None


class Mixed(nn.Module):
    """From each of some tensors it may take, work on, detach or forget them."""

    def __init__(self, choices: list[tuple[str, int]]) -> None:
        super().__init__()
        self.choices = choices
        self.linears = nn.ModuleList(nn.Linear(6, 6) for _ in choices)

    def forward(self, values: Any) -> tuple[torch.Tensor, ...]:
        values = values if isinstance(values, tuple) else (values,) * len(self.choices)
        results = []
        for (kind, index), linear in zip(self.choices, self.linears, strict=True):
            value = values[index].detach() if kind == "detach" else values[index]
            results.append(value if kind == "pass" else torch.tanh(linear(value)))
        return tuple(results)


@st.composite
def mixed(draw: Any) -> nn.Sequential:
    """Eight blocks with three tensors between them, some parameters frozen, and one tensor out."""
    choice = st.tuples(st.sampled_from(["work", "pass", "detach"]), st.integers(0, 2))
    torch.manual_seed(0)
    blocks = [Mixed(draw(st.lists(choice, min_size=3, max_size=3))) for _ in range(7)]
    model = nn.Sequential(*blocks, Join(lambda side: True)).double()
    for block in blocks:
        block.requires_grad_(draw(st.integers(0, 3)) > 0)
    return model


@given(mixed(), st.sampled_from(LAYOUTS), st.sampled_from(["none", "block", "full"]), st.booleans())
@settings(max_examples=15)
def test_whatever_is_used_the_same_parameters_have_gradients_as_in_one_process(
    model: nn.Sequential, layout: tuple[str, int, int], recompute: str, dynamic: bool
) -> None:
    schedule, chunks, pp = layout
    steps = [vectors(5, seed=step) for step in range(2)]
    options: dict[str, Any] = {"schedule": schedule, "chunks": chunks, "microbatches": 4, "recompute": recompute}
    mine = run_pipeline(model, F.mse_loss, [[step] for step in steps], pp, optimizer=ADAMW, dynamic=dynamic, **options)
    assert_same(mine, run_plain(model, F.mse_loss, [[parts(step, 4)] for step in steps], optimizer=ADAMW), 0)


def positive(side: torch.Tensor) -> bool:
    """Depends on the data: whether the last number was made large."""
    return bool(side[0, 0] > 0)


def steps_with(*signs: float) -> list[Pair]:
    inputs, targets = vectors(2)
    return [(inputs.abs() * sign, targets) for sign in signs]


def signed() -> nn.Sequential:
    """Uses the side value where its numbers are positive, which are the inputs' signs."""
    model = forked(positive)
    with torch.no_grad():
        model.get_parameter("0.side.weight").fill_(1.0)
        model.get_parameter("0.side.bias").zero_()
    return model


def test_a_tensor_that_is_not_used_this_time_has_a_gradient_of_zeros() -> None:
    steps = [[step] for step in steps_with(1, -1)]
    mine = run_pipeline(signed(), F.mse_loss, steps, 4, microbatches=1)
    assert_same(mine, run_plain(signed(), F.mse_loss, [[parts(step[0], 1)] for step in steps]), 0)


@pytest.mark.parametrize("pp", [2, 4])
def test_a_tensor_that_is_used_for_the_first_time_later_is_refused_with_the_remedy(pp: int) -> None:
    steps = [[step] for step in steps_with(-1, 1)]
    with pytest.raises(BoundaryError, match=r"tensor 1 of the input, float64.*dynamic=True"):
        run_pipeline(signed(), F.mse_loss, steps, pp, microbatches=1)
    mine = run_pipeline(signed(), F.mse_loss, steps, pp, microbatches=1, dynamic=True)
    assert_same(mine, run_plain(signed(), F.mse_loss, [[parts(step[0], 1)] for step in steps]), 0)
