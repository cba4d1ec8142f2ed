"""Dropout whose masks belong to a sample, not to a rank or a moment."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from pipert.errors import BatchError, ConfigError
from pipert.layers.names import join
from pipert.randomness import Draw, current_draw, stream


class Dropout(nn.Module):
    """Zero each element with probability ``p`` and scale the rest by ``1 / (1 - p)``, in training mode.

    Inside `pipert.randomness.drawing`, row i of the input is sample ``draw.samples[i]``, and its mask comes from the
    stream (seed, "dropout", layer name, step, sample). So it is the same whichever rank, replica or micro-batch
    computes the sample, and again when the forward pass is recomputed. Outside, this is ``torch.nn.functional.dropout``
    on torch's global generator.

    Masks are drawn by the device's own generator: CPU and GPU runs have different ones.

    Args:
        p: probability of zeroing, ``0 <= p <= 1``.
        layer_name: the layer's name in the whole model; usually given later, by `name_layers`.
    """

    uses_global_random = False  # so the engine need not seed torch's generator around it

    def __init__(self, p: float = 0.5, layer_name: str | None = None) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ConfigError(f"dropout probability {p} is not between 0 and 1")
        self.p = p
        self.layer_name = layer_name

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
        return x.masked_fill(self.dropped(draw, x), 0.0) * (1.0 / (1.0 - self.p))

    def dropped(self, draw: Draw, x: torch.Tensor) -> torch.Tensor:
        """The mask for ``x``: bool, true where an element is zeroed."""
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
        mask = torch.empty(x.shape, dtype=torch.bool, device=x.device)
        for row, sample in zip(mask, draw.samples, strict=True):
            key = ("dropout", self.layer_name, draw.step, sample)
            row.bernoulli_(self.p, generator=stream(draw.seed, *key, device=x.device))
        return mask

    def extra_repr(self) -> str:
        """What ``repr`` shows between the parentheses."""
        return f"p={self.p}" + (f", layer_name={self.layer_name!r}" if self.layer_name else "")


def name_layers(module: nn.Module, prefix: str = "") -> None:
    """Give every `Dropout` in ``module`` its name: ``prefix`` and the path inside the module.

    Call it with the module's own name in the whole model, such as ``"blocks.3"``; with the whole model, without one.
    """
    for path, layer in module.named_modules():
        if isinstance(layer, Dropout):
            layer.layer_name = join(prefix, path)
