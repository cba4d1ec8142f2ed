"""Kernels, built before the first step: a compiler takes seconds, while the other ranks would wait in a step."""

from __future__ import annotations

import torch
from torch import nn

import pipert.hipkernels as hk
from pipert.errors import ConfigError
from pipert.hipkernels.errors import KernelError


def prepare(model: nn.Module, loss_fn: object, device: torch.device | None) -> str:
    """Load the kernels if a layer of the model or the loss calls them; build them if need be.

    Of the ranks on a node one builds, and the others wait for it.

    Args:
        model: modules that call kernels have an attribute ``uses_kernels``.
        loss_fn: likewise.
        device: where they will run; None: where the model is, else the CPU.

    Returns:
        what is used, which must be the same on every rank: ``kernels``, ``reference`` or ``none``.

    Raises:
        ConfigError: ``PIPERT_KERNELS`` cannot be obeyed.
    """
    if not any(getattr(part, "uses_kernels", False) for part in (*model.modules(), loss_fn)):
        return "none"
    real = (parameter.device for parameter in model.parameters() if not parameter.is_meta)
    try:
        return hk.prepare(device or next(real, torch.device("cpu")))
    except KernelError as error:
        raise ConfigError(str(error)) from error
