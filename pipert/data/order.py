"""The order in which samples are seen: a function of (seed, epoch), computed piece by piece."""

from __future__ import annotations

from numbers import Integral

import numpy as np
import numpy.typing as npt

from pipert.errors import DataError
from pipert.randomness import digest

_ROUNDS = 6


class Order:
    """An endless or finite stream of sample ids: one permutation of all samples an epoch.

    Position p of the stream is sample ``p % samples`` of the permutation of epoch ``p // samples``. No permutation is
    ever held in memory: each is a Feistel network on the ids, keyed by (seed, epoch), with ids beyond the last walked
    on until they fall inside (Black and Rogaway 2002).

    Args:
        samples: number of samples.
        seed: the run's seed.
        epochs: how often each sample is seen; None: the stream is endless.

    Raises:
        DataError: no samples, or numbers that are no counts.

    Example:
        >>> Order(8, seed=0).ids(0, 16).tolist()
        [1, 5, 4, 3, 2, 7, 6, 0, 6, 0, 2, 7, 1, 3, 4, 5]
    """

    def __init__(self, samples: int, seed: int = 0, epochs: int | None = None) -> None:
        whole("samples", samples, 1)
        if epochs is not None:
            whole("epochs", epochs, 0, "; use None for an endless order")
        self.samples = samples
        self.seed = seed
        self.length = None if epochs is None else samples * epochs

    def ids(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The samples at positions ``[start, stop)`` of the stream, fewer where it ends before.

        Raises:
            DataError: ``start`` is before the stream.
        """
        whole("start", start, 0)
        if self.length is not None:
            stop = min(stop, self.length)
        pieces = [np.zeros(0, dtype=np.int64)]
        while start < stop:
            epoch, first = divmod(start, self.samples)
            last = min(first + stop - start, self.samples)
            pieces.append(self._permuted(epoch, np.arange(first, last, dtype=np.uint64)))
            start += last - first
        return np.concatenate(pieces)

    def _permuted(self, epoch: int, places: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        keys = [np.uint64(digest(self.seed, "order", epoch, index)) for index in range(_ROUNDS)]
        half = max(1, ((self.samples - 1).bit_length() + 1) // 2)
        ids = _feistel(places, keys, half)
        while (outside := ids >= self.samples).any():  # a permutation of 4**half < 4 * samples ids: few walks
            ids[outside] = _feistel(ids[outside], keys, half)
        return ids.astype(np.int64)


def whole(name: str, value: int, least: int, remedy: str = "") -> None:
    """Refuse what is no whole number of at least ``least``.

    Raises:
        DataError: it is not.
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise DataError(f"{name} is {value!r}; it must be a whole number of at least {least}{remedy}")


def _feistel(ids: npt.NDArray[np.uint64], keys: list[np.uint64], half: int) -> npt.NDArray[np.uint64]:
    """A bijection of ``[0, 4**half)``: each round mixes one half of the bits into the other."""
    mask = np.uint64((1 << half) - 1)
    left, right = ids >> np.uint64(half), ids & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << np.uint64(half)) | right


def _mixed(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's finaliser (Steele et al. 2014)."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
