"""The samples and their order do not depend on replicas, batch sizes or where a run was stopped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipert.data import Loader, Order, TokenWindows
from pipert.errors import DataError

SEQUENCE = 4


def windows(samples: int) -> TokenWindows:
    """Samples that can be recognised: sample i starts with token 4 i."""
    return TokenWindows(np.arange(samples * SEQUENCE + 1, dtype=np.uint16), SEQUENCE)


def seen(loaders: list[Loader], batches: int | None = None) -> list[int]:
    """Sample ids that the replicas get together, batch after batch, in the order of the replicas."""
    ids: list[int] = []
    while batches is None or batches > 0:
        parts = [next(loader, None) for loader in loaders]
        if parts[0] is None:
            assert all(part is None for part in parts)
            break
        for part in parts:
            assert part is not None
            ids += (part[0][:, 0] // SEQUENCE).tolist()
        batches = None if batches is None else batches - 1
    return ids


def replicas(count: int, batch: int, *, samples: int = 64, epochs: int | None = 2, seed: int = 5) -> list[Loader]:
    data = windows(samples)
    return [Loader(data, batch, seed=seed, epochs=epochs, replica=r, replicas=count) for r in range(count)]


def test_a_run_that_stopped_at_20_of_64_goes_on_with_the_same_samples_at_any_layout() -> None:
    whole = seen(replicas(1, 4))
    assert len(whole) == 128
    assert sorted(whole[:64]) == sorted(whole[64:]) == list(range(64))
    for before in ((1, 4), (2, 4), (1, 20), (4, 10)):
        for after in ((1, 4), (1, 1), (2, 4), (3, 7), (4, 32), (5, 128)):
            first = replicas(*before)
            head = seen(first, batches=20 // before[1])
            resumed = replicas(*after)
            for loader in resumed:
                loader.load_state_dict(first[-1].state_dict())
            assert head + seen(resumed) == whole


@given(
    samples=st.integers(1, 30),
    epochs=st.integers(1, 3),
    stops=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 40), st.integers(0, 4)), min_size=1, max_size=4),
)
def test_any_chain_of_stops_and_layouts_sees_the_uninterrupted_order(
    samples: int, epochs: int, stops: list[tuple[int, int, int]]
) -> None:
    whole = Order(samples, 5, epochs).ids(0, samples * epochs).tolist()
    got: list[int] = []
    state = {"seen": 0, "samples": samples, "seed": 5}
    for index, (count, batch, batches) in enumerate(stops):
        loaders = replicas(count, batch, samples=samples, epochs=epochs)
        for loader in loaders:
            loader.load_state_dict(state)
        got += seen(loaders, batches=None if index == len(stops) - 1 else batches)
        state = loaders[0].state_dict()
    assert got == whole


def test_shares_are_contiguous_and_nearly_equal() -> None:
    loaders = replicas(3, 8)
    ids = loaders[0].upcoming().tolist()
    parts = [(next(loader)[0][:, 0] // SEQUENCE).tolist() for loader in loaders]
    assert [len(part) for part in parts] == [3, 3, 2]
    assert parts[0] + parts[1] + parts[2] == ids


def test_only_the_last_batch_of_all_is_smaller() -> None:
    (loader,) = replicas(1, 10, samples=12)
    assert [len(inputs) for inputs, _ in loader] == [10, 10, 4]
    assert loader.epoch == 2
    with pytest.raises(StopIteration):
        next(loader)


def test_a_replica_without_a_sample_in_the_last_batch_gets_an_empty_one() -> None:
    loaders = replicas(2, 4, samples=5, epochs=1)
    parts = [[inputs.shape for inputs, _ in loader] for loader in loaders]
    assert parts == [[(2, 4), (1, 4)], [(2, 4), (0, 4)]]


def test_an_endless_loader_goes_from_epoch_to_epoch() -> None:
    (loader,) = replicas(1, 3, samples=4, epochs=None)
    assert [loader.epoch for _ in zip(range(8), loader, strict=False)] == [0, 1, 2, 3, 3, 4, 5, 6]


def test_skipping_is_reading_without_the_reading() -> None:
    one, two = replicas(1, 5, samples=12)[0], replicas(1, 5, samples=12)[0]
    next(one), next(one)
    two.skip(2)
    assert torch.equal(next(one)[0], next(two)[0])
    two.skip(100)
    assert two.seen == 24
    assert next(two, None) is None


def test_inputs_and_targets_are_one_token_apart() -> None:
    inputs, targets = windows(9).batch([3, 0])
    assert inputs.tolist() == [[12, 13, 14, 15], [0, 1, 2, 3]]
    assert targets.tolist() == [[13, 14, 15, 16], [1, 2, 3, 4]]
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous() and targets.is_contiguous()


@given(tokens=st.integers(2, 60), sequence=st.integers(1, 59))
def test_every_token_that_fills_a_window_is_a_target_once(tokens: int, sequence: int) -> None:
    if tokens <= sequence:
        with pytest.raises(DataError, match=f"{tokens} tokens are too few for a sample of {sequence}"):
            TokenWindows(np.arange(tokens), sequence)
        return
    data = TokenWindows(np.arange(tokens), sequence)
    _, targets = data.batch(range(len(data)))
    assert targets.flatten().tolist() == list(range(1, len(data) * sequence + 1))
    assert tokens - 1 - len(data) * sequence < sequence


def test_a_position_in_another_order_is_refused() -> None:
    (loader,) = replicas(1, 4)
    with pytest.raises(DataError, match="samples 63, and here it is 64"):
        loader.load_state_dict({"seen": 20, "samples": 63, "seed": 5})
    with pytest.raises(DataError, match=r"seed 4, and here it is 5.*same data"):
        loader.load_state_dict({"seen": 20, "samples": 64, "seed": 4})
    assert loader.seen == 0


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({}, "a position without seen, samples, seed; give back what state_dict returned"),
        ({"seen": 3, "seed": 5}, "a position without samples"),
        ({"seen": -3, "samples": 64, "seed": 5}, "seen is -3; it must be a whole number of at least 0"),
        ({"seen": "3", "samples": 64, "seed": 5}, "seen is '3'"),
    ],
)
def test_what_is_no_position_is_refused_and_nothing_moves(state: dict[str, Any], reason: str) -> None:
    (loader,) = replicas(1, 4)
    loader.skip(2)
    with pytest.raises(DataError, match=reason):
        loader.load_state_dict(state)
    assert loader.seen == 8


def test_a_loader_never_goes_back() -> None:
    (loader,) = replicas(1, 4)
    with pytest.raises(DataError, match="batches is -1; it must be a whole number of at least 0"):
        loader.skip(-1)


@pytest.mark.parametrize("ids", [[-1], [-2], [3], [0, 99]])
def test_a_sample_that_there_is_not_is_refused_not_read_from_elsewhere(ids: list[int]) -> None:
    data = TokenWindows(np.arange(10), 3)
    assert len(data) == 3
    with pytest.raises(DataError, match=f"sample {ids[-1]} of 3; samples are 0 to 2"):
        data.batch(ids)


def test_impossible_loaders_are_refused() -> None:
    for wrong in (1.5, "8", True, -1):
        with pytest.raises(DataError, match="global_batch is "):
            Loader(windows(3), wrong)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="replicas is 0"):
        Loader(windows(3), 1, replicas=0)
    with pytest.raises(DataError, match="global_batch is 0"):
        Loader(windows(3), 0)
    with pytest.raises(DataError, match="replica 2 of 2"):
        Loader(windows(3), 1, replica=2, replicas=2)
