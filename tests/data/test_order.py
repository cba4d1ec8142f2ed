"""The order is one permutation an epoch, a function of (seed, epoch) and of nothing else."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipert.data import Order
from pipert.errors import DataError


@given(samples=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 50))
def test_each_epoch_is_a_permutation(samples: int, seed: int, epoch: int) -> None:
    ids = Order(samples, seed).ids(epoch * samples, (epoch + 1) * samples)
    assert sorted(ids.tolist()) == list(range(samples))


@given(samples=st.integers(1, 50), cuts=st.lists(st.integers(0, 170), max_size=8), epochs=st.sampled_from([None, 3]))
def test_pieces_put_together_are_the_whole(samples: int, cuts: list[int], epochs: int | None) -> None:
    order = Order(samples, 3, epochs)
    end = 170 if epochs is None else 3 * samples
    edges = [0, *sorted(cuts), 170]
    pieces = [order.ids(start, stop) for start, stop in itertools.pairwise(edges)]
    whole = order.ids(0, 170)
    assert np.concatenate(pieces).tolist() == whole.tolist()
    assert len(whole) == min(170, end)


def test_epochs_and_seeds_have_different_orders() -> None:
    orders = [Order(100, seed).ids(epoch * 100, (epoch + 1) * 100) for seed in range(3) for epoch in range(3)]
    for index, left in enumerate(orders):
        assert np.mean(left == np.arange(100)) < 0.1
        for right in orders[:index]:
            assert np.mean(left == right) < 0.1


@pytest.mark.parametrize("samples", [5, 10, 50])
def test_every_sample_is_equally_likely_everywhere(samples: int) -> None:
    epochs = 1500
    ids = Order(samples, 1).ids(0, samples * epochs).reshape(epochs, samples)
    counts = np.stack([np.bincount(column, minlength=samples) for column in ids.T])
    freedom = (samples - 1) ** 2
    chi_square = ((counts - epochs / samples) ** 2 / (epochs / samples)).sum()
    assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5


def test_all_orders_of_three_occur_equally_often() -> None:
    found = Counter(tuple(Order(3, seed).ids(0, 3).tolist()) for seed in range(1200))
    assert len(found) == 6
    assert all(140 < count < 260 for count in found.values())


def test_the_order_is_the_same_on_every_machine() -> None:
    assert Order(8, seed=0).ids(0, 16).tolist() == [1, 5, 4, 3, 2, 7, 6, 0, 6, 0, 2, 7, 1, 3, 4, 5]


def test_a_piece_of_a_huge_order_costs_only_itself() -> None:
    order = Order(10**15, 0)
    ids = order.ids(10**15 - 3, 10**15 + 3)
    assert len(set(ids.tolist())) >= 5
    assert ((ids >= 0) & (ids < 10**15)).all()


def test_an_order_of_nothing_is_refused() -> None:
    with pytest.raises(DataError, match="at least 1"):
        Order(0)
    with pytest.raises(DataError, match="None for an endless"):
        Order(1, epochs=-1)
    with pytest.raises(DataError, match=r"epochs is 1.5; it must be a whole number"):
        Order(1, epochs=1.5)  # type: ignore[arg-type]


def test_nothing_is_before_the_stream() -> None:
    with pytest.raises(DataError, match="start is -2; it must be a whole number of at least 0"):
        Order(4).ids(-2, 3)
