"""Dropout whose masks belong to a sample, not to a rank or a moment."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import pipert.hipkernels as hk
from pipert.errors import BatchError, ConfigError
from pipert.layers.names import join
from pipert.randomness import Draw, current_draw, digest


class Dropout(nn.Module):
    """Zero each element with probability ``p`` and scale the rest by ``1 / (1 - p)``, in training mode.

    Inside `pipert.randomness.drawing`, row i of the input is sample ``draw.samples[i]``, and its mask comes from the
    stream (seed, "dropout", layer name, step, sample): a key, from which Philox makes a random word for each element of
    the sample. So it is the same whichever rank, replica, micro-batch or kind of device computes the sample, with and
    without kernels, and again when the forward pass is recomputed. Outside, this is
    ``torch.nn.functional.dropout`` on torch's global generator.

    Args:
        p: probability of zeroing, ``0 <= p <= 1``.
        layer_name: the layer's name in the whole model; usually given later, by `name_layers`.
    """

    uses_global_random = False  # so the engine need not seed torch's generator around it
    uses_kernels = True

    def __init__(self, p: float = 0.5, layer_name: str | None = None) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ConfigError(f"dropout probability {p} is not between 0 and 1")
        self.p = p
        self.layer_name = layer_name

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
        return hk.bias_dropout_add(x, None, residual, p=self.p, keys=keys)

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
        bits = (digest(draw.seed, "dropout", self.layer_name, draw.step, sample) for sample in draw.samples)
        return torch.tensor([word - (word >> 63 << 64) for word in bits], dtype=torch.int64, device=x.device)

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
