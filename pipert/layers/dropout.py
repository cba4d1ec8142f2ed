"""Dropout whose masks belong to a sample, not to a rank or a moment."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional as F

from pipert.errors import BatchError, ConfigError
from pipert.hipkernels import bias_dropout_add
from pipert.hipkernels.reference.dropout import philox
from pipert.layers.names import join
from pipert.randomness import Draw, current_draw, digest, random_words


@dataclass(frozen=True)
class Part:
    """Which part of each sample a tensor-parallel rank holds.

    Attributes:
        dim: the dimension that is cut into equal parts, 1 or more (dimension 0 is the samples).
        index: which of the parts.
        parts: how many there are.

    Raises:
        ConfigError: there is no such part.
    """

    dim: int
    index: int
    parts: int

    def __post_init__(self) -> None:
        if self.dim < 1 or not 0 <= self.index < self.parts:
            raise ConfigError(
                f"{self} of a dropout layer's input: use dim >= 1 (dimension 0 is the samples) and 0 <= index < parts"
            )


class Dropout(nn.Module):
    """Zero each element with probability ``p`` and scale the rest by ``1 / (1 - p)``, in training mode.

    Inside `pipert.randomness.drawing`, row i of the input is sample ``draw.samples[i]``. Its element e is kept if word
    ``e % 4`` of Philox4x32-10(key, e // 4) is at least ``p * 2**32``, where the key is the digest of (seed, "dropout",
    layer name, step, sample): the rule of ``pipert.hipkernels.bias_dropout_add``. So the mask is the same whichever
    rank, replica or micro-batch computes the sample, on every device, and again when the forward pass is recomputed.
    A layer that sees a `Part` of each sample draws that part of the whole mask: tensor parallelism does not change it.
    Outside, this is ``torch.nn.functional.dropout`` on torch's global generator.

    Args:
        p: probability of zeroing, ``0 <= p <= 1``.
        layer_name: the layer's name in the whole model; usually given later, by `name_layers`.
        part: which part of each sample it sees; None: all of it, as in regions that tensor parallelism replicates.
    """

    uses_global_random = False  # so the engine need not seed torch's generator around it

    def __init__(self, p: float = 0.5, layer_name: str | None = None, part: Part | None = None) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ConfigError(f"dropout probability {p} is not between 0 and 1")
        self.p = p
        self.layer_name = layer_name
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drop elements of ``x``, shape (samples, ...).

        Raises:
            ConfigError: a draw is current and the layer has no name.
            BatchError: the rows of x are not the samples of the draw.
        """
        draw = current_draw()
        if not self.training or self.p == 0.0:
            return x
        if draw is None:
            return F.dropout(x, self.p)
        if self.p == 1.0:
            return x * 0.0
        if x.device.type != "cpu" and x.dim() > 1 and (self.part is None or self.part.dim == 1):
            keys = _signed(self._keys_of(draw, x), x.device)
            offset = x[0].numel() * self.part.index if self.part and len(x) else 0
            return bias_dropout_add(x, p=self.p, keys=keys, offset=offset)
        return x.masked_fill(self.dropped(draw, x), 0.0) * (1.0 / (1.0 - self.p))

    def keys(self, draw: Draw) -> list[int]:
        """The key of each sample's mask, 64 bits.

        Raises:
            ConfigError: the layer has no name.
        """
        if self.layer_name is None:
            raise ConfigError(
                "a Dropout layer without a name cannot draw the same mask in every layout; "
                "call pipert.layers.name_layers(model) once, or pass layer_name"
            )
        return [digest(draw.seed, "dropout", self.layer_name, draw.step, sample) for sample in draw.samples]

    def dropped(self, draw: Draw, x: torch.Tensor) -> torch.Tensor:
        """The mask for ``x``: bool, true where an element is zeroed."""
        keys = self._keys_of(draw, x)
        threshold, runs = min(round(self.p * 2**32), 2**32 - 1), _runs(tuple(x.shape[1:]), self.part)
        if x.device.type != "cpu":
            return (_words_on(x.device, keys, runs) < threshold).view(x.shape)
        mask = np.stack([_words(key, runs) < np.uint32(threshold) for key in keys]) if keys else np.zeros(0, np.bool_)
        return torch.from_numpy(mask).view(x.shape)

    def _keys_of(self, draw: Draw, x: torch.Tensor) -> list[int]:
        """The keys, where the input's rows are the draw's samples."""
        keys = self.keys(draw)
        if x.dim() == 0 or len(x) != len(keys):
            raise BatchError(
                f"dropout {self.layer_name}: input of shape {tuple(x.shape)} for {len(keys)} samples; "
                "dimension 0 of the input must be the samples of the micro-batch"
            )
        if self.part is not None and self.part.dim >= x.dim():
            raise BatchError(
                f"dropout {self.layer_name}: input of shape {tuple(x.shape)} has no dimension of {self.part}"
            )
        return keys

    def extra_repr(self) -> str:
        """What ``repr`` shows between the parentheses."""
        name = f", layer_name={self.layer_name!r}" if self.layer_name else ""
        return f"p={self.p}{name}" + (f", part={self.part}" if self.part else "")


@dataclass(frozen=True, eq=False)
class _Runs:
    """The elements of a sample that are held here: runs of neighbours.

    Attributes:
        starts: the number of each run's first element, ``[runs]``.
        length: the elements of each run.
    """

    starts: npt.NDArray[np.int64]
    length: int


def _runs(shape: tuple[int, ...], part: Part | None) -> _Runs:
    """Where the elements of a part of this shape are in a whole sample."""
    if part is None:
        return _Runs(np.zeros(1, dtype=np.int64), prod(shape))
    length = prod(shape[part.dim - 1 :])
    outer = np.arange(prod(shape[: part.dim - 1]), dtype=np.int64)
    return _Runs((outer * part.parts + part.index) * length, length)


def _words(key: int, runs: _Runs) -> npt.NDArray[np.uint32]:
    """The random word of each element, ``[runs, length]``."""
    quads, skips = np.divmod(runs.starts, 4)
    count = (int(skips.max(initial=0)) + runs.length + 3) // 4
    counters = (quads[:, None] + np.arange(count)).astype(np.uint64)
    words = random_words(key, counters.reshape(-1)).reshape(len(quads), -1)
    if not skips.any():
        return words[:, : runs.length]
    return np.take_along_axis(words, skips[:, None] + np.arange(runs.length), axis=1)


def _words_on(device: torch.device, keys: list[int], runs: _Runs) -> torch.Tensor:
    """The same for all keys on another device, int64 ``[samples, runs, length]``."""
    elements = torch.from_numpy(runs.starts).to(device)[:, None] + torch.arange(runs.length, device=device)
    first = elements[:, :1] // 4
    counters = first + torch.arange(runs.length // 4 + 2, device=device)
    words = philox(_signed(keys, device)[:, None, None], counters).flatten(2)
    return words.gather(2, (elements - 4 * first).expand(len(keys), -1, -1))


def _signed(keys: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([key - (key >> 63 << 64) for key in keys], dtype=torch.int64, device=device)


def name_layers(module: nn.Module, prefix: str = "") -> None:
    """Give every `Dropout` in ``module`` its name: ``prefix`` and the path inside the module.

    Call it with the module's own name in the whole model, such as ``"blocks.3"``; with the whole model, without one.
    """
    for path, layer in module.named_modules():
        if isinstance(layer, Dropout):
            layer.layer_name = join(prefix, path)
