"""Dropout whose masks belong to a sample, not to a rank or a moment."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import nn
from torch.nn import functional as F

import pipert.hipkernels as hk
from pipert.errors import BatchError, ConfigError
from pipert.hipkernels.reference.dropout import kept
from pipert.layers.names import join
from pipert.randomness import Draw, current_draw, digest


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

    Inside `pipert.randomness.drawing`, row i of the input is sample ``draw.samples[i]``, and its mask comes from the
    stream (seed, "dropout", layer name, step, sample): a key, from which Philox makes a random word for each element of
    the sample. So it is the same whichever rank, replica, micro-batch or kind of device computes the sample, with and
    without kernels, and again when the forward pass is recomputed. Outside, this is
    ``torch.nn.functional.dropout`` on torch's global generator. A layer that sees a `Part` of each sample draws that
    part of the whole mask: tensor parallelism does not change it.

    Args:
        p: probability of zeroing, ``0 <= p <= 1``.
        layer_name: the layer's name in the whole model; usually given later, by `name_layers`.
        part: which part of each sample it sees; None: all of it, as in regions that tensor parallelism replicates.
    """

    uses_global_random = False  # so the engine need not seed torch's generator around it
    uses_kernels = True

    def __init__(self, p: float = 0.5, layer_name: str | None = None, part: Part | None = None) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ConfigError(f"dropout probability {p} is not between 0 and 1")
        self.p = p
        self.layer_name = layer_name
        self.part = part

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Drop elements of ``x``, shape (samples, ...); then add the residual, if there is one.

        Raises:
            ConfigError: a draw is current and the layer has no name.
            BatchError: the rows of x are not the samples of the draw.
        """
        if not self.training or self.p == 0.0:
            return x if residual is None else residual + x
        draw = current_draw()
        if draw is None:
            dropped = F.dropout(x, self.p)
            return dropped if residual is None else residual + dropped
        keys = self.keys(draw, x)
        if x.dim() == 1:
            return self.forward(x[:, None], None if residual is None else residual[:, None])[:, 0]
        part = self.part
        if part is None or part.dim == 1:
            offset = part.index * (x.numel() // max(len(x), 1)) if part else 0
            return hk.bias_dropout_add(x, None, residual, p=self.p, keys=keys, offset=offset)
        dropped = torch.where(self._kept(part, x, keys), x * (1.0 / (1.0 - self.p) if self.p < 1.0 else 0.0), 0.0)
        return dropped if residual is None else residual + dropped

    def _kept(self, part: Part, x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """The part of the whole mask, which is drawn; true where elements are kept."""
        whole = list(x.shape)
        whole[part.dim] *= part.parts
        mask = kept(keys, prod(whole[1:]), 0, min(round(self.p * 2**32), 2**32 - 1)).reshape(whole)
        return mask.narrow(part.dim, part.index * x.shape[part.dim], x.shape[part.dim])

    def keys(self, draw: Draw, x: torch.Tensor) -> torch.Tensor:
        """For each sample of ``x`` the key of its mask: int64, shape (samples,)."""
        if self.layer_name is None:
            raise ConfigError(
                "a Dropout layer without a name cannot draw the same mask in every layout; "
                "call pipert.layers.name_layers(model) once, or pass layer_name"
            )
        if x.dim() == 0 or len(x) != len(draw.samples):
            raise BatchError(
                f"dropout {self.layer_name}: input of shape {tuple(x.shape)} for {len(draw.samples)} samples; "
                "dimension 0 of the input must be the samples of the micro-batch"
            )
        if self.part is not None and self.part.dim >= x.dim():
            raise BatchError(
                f"dropout {self.layer_name}: input of shape {tuple(x.shape)} has no dimension of {self.part}"
            )
        bits = (digest(draw.seed, "dropout", self.layer_name, draw.step, sample) for sample in draw.samples)
        return torch.tensor([word - (word >> 63 << 64) for word in bits], dtype=torch.int64, device=x.device)

    def extra_repr(self) -> str:
        """What ``repr`` shows between the parentheses."""
        name = f", layer_name={self.layer_name!r}" if self.layer_name else ""
        return f"p={self.p}{name}" + (f", part={self.part}" if self.part else "")


def name_layers(module: nn.Module, prefix: str = "") -> None:
    """Give every `Dropout` in ``module`` its name: ``prefix`` and the path inside the module.

    Call it with the module's own name in the whole model, such as ``"blocks.3"``; with the whole model, without one.
    """
    for path, layer in module.named_modules():
        if isinstance(layer, Dropout):
            layer.layer_name = join(prefix, path)
