"""What a model knows that has only counted tokens: the least that training must beat."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pipert.data.tokenizer import Ids
from pipert.errors import DataError

_CHUNK = 1 << 22


def unigram_loss(train: Ids, heldout: Ids, vocabulary: int) -> float:
    """Mean ``-log p(token)`` over held-out tokens, in nats, with p from the counts in ``train`` plus one each.

    Args:
        train: ids that are counted, shape (any,).
        heldout: ids that are predicted, at least one.
        vocabulary: number of ids.

    Raises:
        DataError: nothing is held out, or an id is outside of the vocabulary.
    """
    if not len(heldout):
        raise DataError("no held-out ids; hold out some of the text to measure on")
    counts = _counts(train, vocabulary) + 1.0
    probability = counts / counts.sum()
    share = _counts(heldout, vocabulary) / len(heldout)
    return float(-(share @ np.log(probability)))


def _counts(ids: Ids, vocabulary: int) -> npt.NDArray[np.int64]:
    """How often each id occurs, counted piece by piece: the ids may be a mapped file larger than memory."""
    counts = np.zeros(vocabulary, dtype=np.int64)
    for start in range(0, len(ids), _CHUNK):
        found = np.bincount(ids[start : start + _CHUNK], minlength=vocabulary)
        if len(found) > vocabulary:
            raise DataError(f"id {len(found) - 1} for a vocabulary of {vocabulary}; ids must be below it")
        counts += found
    return counts
