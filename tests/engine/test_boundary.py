"""What crosses a stage boundary is free, and the numbers stay those of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipert.comm.local import run_ranks
from pipert.comm.mesh import Mesh
from pipert.engine.pipeline import Pipeline
from pipert.errors import BoundaryError
from tests.engine.world import SCHEDULES, Residual, assert_same, parts, run_pipeline, run_plain, vectors


class Hidden(NamedTuple):
    value: Any
    rest: Any


@dataclass
class State:
    hidden: Any
    table: Any
    ids: Any = None
    name: str = "state"


class Spread(nn.Module):
    """From a tensor to a value of any kind."""

    def __init__(self, make: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        table = torch.linspace(0, 1, 6, dtype=x.dtype)
        return self.make(torch.tanh(self.linear(x)), table)


class Through(nn.Module):
    """Changes the first tensor with a gradient, uses the others, hands on the rest as it is."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.kind = kind

    def forward(self, value: Any) -> Any:
        if self.kind == "five":
            hidden, table, ids, mask, empty = value
            assert empty.shape == (0,) and ids.dtype == torch.int64 and mask.dtype == torch.bool
            assert hidden.requires_grad == torch.is_grad_enabled() and not table.requires_grad
            return self.linear(hidden * mask) + table * ids.sum(), table, ids, mask, empty
        if self.kind == "dict":
            return {**value, "hidden": self.linear(value["hidden"]) * value["scale"], "more": value["hidden"]}
        if self.kind == "dataclass":
            return State(self.linear(value.hidden) + value.table, value.table, value.ids, value.name)
        if self.kind == "namedtuple":
            return Hidden(self.linear(value.value), (value.rest[0], value.value))
        if self.kind == "one":
            return self.linear(value)
        return (self.linear(value[0]), *value[1:])


class Join(nn.Module):
    """Back to one tensor."""

    def __init__(self, pick: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.pick = pick

    def forward(self, value: Any) -> torch.Tensor:
        return self.linear(self.pick(value))


def five(h: torch.Tensor, table: torch.Tensor) -> Any:
    return h, table, torch.arange(3), h.detach()[:, :1] > 0, torch.empty(0)


KINDS: dict[str, tuple[Callable[..., Any], Callable[[Any], torch.Tensor]]] = {
    "five": (five, lambda v: v[0] + v[1]),
    "dict": (lambda h, t: {"hidden": h, "scale": 0.5, "more": h, "name": "x"}, lambda v: v["hidden"] + v["more"]),
    "dataclass": (lambda h, t: State(h, t, torch.arange(2)), lambda v: v.hidden + v.ids[1]),
    "namedtuple": (lambda h, t: Hidden(h, (t, h * 2)), lambda v: v.value + v.rest[0] * v.rest[1]),
    "one": (lambda h, t: h, lambda v: v),
    "single": (lambda h, t: (h,), lambda v: v[0]),
    "two": (lambda h, t: (h, h * 3), lambda v: v[0] * v[1]),
    "three": (lambda h, t: [h, h + t, t], lambda v: v[0] + v[1] + v[2]),
}


@pytest.mark.parametrize(("schedule", "chunks", "pp"), [("1f1b", 1, 2), ("gpipe", 1, 4), ("interleaved", 2, 2)])
@pytest.mark.parametrize("recompute", ["none", "block", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_nesting_crosses_any_number_of_stages(
    kind: str, recompute: str, schedule: str, chunks: int, pp: int
) -> None:
    torch.manual_seed(0)
    make, pick = KINDS[kind]
    blocks = [Spread(make), *(Through(kind if kind in KINDS else "many") for _ in range(4)), Join(pick)]
    model = nn.Sequential(*blocks).double()
    batch = vectors(6)
    mine = run_pipeline(
        model, F.mse_loss, [[batch]] * 2, pp, schedule=schedule, chunks=chunks, microbatches=3, recompute=recompute
    )
    assert_same(mine, run_plain(model, F.mse_loss, [[parts(batch, 3)]] * 2), 0)


class InPlaceFirst(nn.Module):
    """Changes its input in place before anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(F.relu_(x.add_(0.1)))


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_a_block_may_change_its_input_in_place(schedule: str, chunks: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), *(InPlaceFirst() for _ in range(5))).double()
    batch = vectors(6)
    mine = run_pipeline(model, F.mse_loss, [[batch]], 2, schedule=schedule, chunks=chunks, microbatches=3)
    assert_same(mine, run_plain(model, F.mse_loss, [[parts(batch, 3)]]), 0)


class AliasInPlace(nn.Module):
    """Gets one tensor twice, changes it under one name and uses it under the other."""

    def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        value[0].mul_(2)
        return value[1] * 1.5


def test_a_tensor_handed_over_twice_is_one_tensor_on_the_other_side() -> None:
    torch.manual_seed(0)
    twice = Spread(lambda h, t: (h * 2,) * 2)
    model = nn.Sequential(nn.Linear(6, 6), twice, AliasInPlace(), nn.Linear(6, 6)).double()
    batch = vectors(4)
    mine = run_pipeline(model, F.mse_loss, [[batch]], 2, microbatches=2)
    assert_same(mine, run_plain(model, F.mse_loss, [[parts(batch, 2)]]), 0)


class View(nn.Module):
    """Hands over views, transposed and expanded tensors of one piece of memory."""

    def forward(self, x: torch.Tensor) -> Any:
        return x, x[:, :2], x.t(), x[:, :1].expand(-1, 6)


def test_views_of_one_tensor_cross_with_their_gradients() -> None:
    torch.manual_seed(0)
    back = Join(lambda v: v[0] + v[1].sum() + v[2].t() * v[3])
    model = nn.Sequential(nn.Linear(6, 6), View(), back, nn.Linear(6, 6)).double()
    batch = vectors(4)
    mine = run_pipeline(model, F.mse_loss, [[batch]], 2, cuts=[2, 2], microbatches=2)
    assert_same(mine, run_plain(model, F.mse_loss, [[parts(batch, 2)]]), 1e-14)


class Counting(nn.Module):
    """Hands over its own buffer and parameter, and changes the buffer in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(6))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> Any:
        self.seen += 1
        return x, self.seen, self.scale


@pytest.mark.parametrize("transport", [{}, {"buffered": True}], ids=["rendezvous", "buffered"])
def test_a_buffer_that_changes_before_it_is_received_is_received_as_it_was(transport: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Counting(), Join(lambda v: v[0] * v[1] * v[2])).double()
    batch = vectors(6)
    mine = run_pipeline(
        model, F.mse_loss, [[batch]], 2, schedule="gpipe", cuts=[1, 1], microbatches=3, transport=transport
    )
    assert_same(mine, run_plain(model, F.mse_loss, [[parts(batch, 3)]]), 0)


class DataDependent(nn.Module):
    """As many rows as the data says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x[: 1 + int(x[0, 0] > 0)])


def sum_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.square().sum() * target.mean()


@pytest.mark.parametrize("dynamic", [False, True])
def test_sizes_that_depend_on_data_need_dynamic_and_are_refused_otherwise(dynamic: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), DataDependent(), nn.Linear(6, 6)).double()
    batches = [vectors(8, seed=seed) for seed in range(4)]
    run = lambda: run_pipeline(  # noqa: E731
        model, sum_loss, [[b] for b in batches], 2, cuts=[2, 1], microbatches=4, dynamic=dynamic
    )
    if dynamic:
        assert_same(run(), run_plain(model, sum_loss, [[parts(b, 4)] for b in batches]), 0)
    else:
        with pytest.raises(
            BoundaryError, match=r"stage 0, micro-batch \d: the output is float64\[\d, 6\] .*dynamic=True"
        ):
            run()


def test_sizes_travel_for_new_signatures_only() -> None:
    model = nn.Sequential(*(Residual(6) for _ in range(4))).double()
    sizes = [[2, 2], [2, 2], [2, 3], [3, 2], [1], [3, 1, 2, 2]]

    def rank(transport: Any) -> list[int]:
        import copy

        pipe = Pipeline(copy.deepcopy(model), F.mse_loss, Mesh.local(pp=2))
        sent = []
        for step in sizes:
            before = pipe.mesh.pp_group.counters.messages["send"]  # type: ignore[attr-defined]
            pipe.step([vectors(size) for size in step])
            sent.append(pipe.mesh.pp_group.counters.messages["send"] - before - len(step))  # type: ignore[attr-defined]
        return sent

    extra = run_ranks(2, rank)
    assert extra[0] == [2, 0, 2, 0, 1, 0]  # messages of rank 0 beyond one activation for each micro-batch
    assert extra[1] == [2, 0, 1, 0, 1, 0]  # which gradients there are, for each micro-batch of a new size


def test_a_value_that_cannot_cross_names_the_stage_and_the_remedy() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Spread(lambda h, t: (h, {1})), Join(lambda v: v[0])).double()
    with pytest.raises(BoundaryError, match="pass tensors and plain data") as caught:
        run_pipeline(model, F.mse_loss, [[vectors(4)]], 2, cuts=[2, 1], microbatches=2)
    assert "rank 0, stage 0, micro-batch 0, action 0F0" in "\n".join(caught.value.__notes__)
