"""The unigram loss is the mean surprise of a model that has counted tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipert.data import unigram, unigram_loss
from pipert.errors import DataError


def test_it_is_its_formula() -> None:
    train, heldout = np.array([0, 0, 0, 1], dtype=np.uint8), np.array([0, 1, 2], dtype=np.uint8)
    expected = -(math.log(4 / 7) + math.log(2 / 7) + math.log(1 / 7)) / 3
    assert unigram_loss(train, heldout, 3) == pytest.approx(expected)


def test_nothing_held_out_or_an_id_outside_of_the_vocabulary_is_refused() -> None:
    with pytest.raises(DataError, match="no held-out ids"):
        unigram_loss(np.array([0, 1]), np.array([], dtype=np.int64), 2)
    with pytest.raises(DataError, match="id 5 for a vocabulary of 2"):
        unigram_loss(np.array([0, 5]), np.array([0]), 2)


def test_counting_in_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.random.default_rng(0).integers(0, 50, 1000, dtype=np.uint16)
    whole = unigram_loss(ids, ids[:100], 61)
    monkeypatch.setattr(unigram, "_CHUNK", 7)
    assert unigram_loss(ids, ids[:100], 61) == whole
