"""Fused kernels from one source for AMD GPUs, NVIDIA GPUs and CPUs.

The operations are functions of torch tensors with gradients, usable under ``torch.compile`` and on meta tensors. They
run compiled kernels where those exist (built at first use) and the torch code of `pipert.hipkernels.reference`
elsewhere. See ``docs/kernels.md``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipert.hipkernels.ops.activation import bias_gelu, swiglu
    from pipert.hipkernels.ops.cross_entropy import (
        cross_entropy,
        cross_entropy_gradient_,
        cross_entropy_losses,
        cross_entropy_statistics,
        cross_entropy_sums,
    )
    from pipert.hipkernels.ops.dropout import bias_dropout_add
    from pipert.hipkernels.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
    from pipert.hipkernels.ops.optimizer import adamw_, scale_cast, squared_norm
    from pipert.hipkernels.ops.rotary import rotary
    from pipert.hipkernels.ops.softmax import masked_softmax

_HOMES = {
    "adamw_": "optimizer",
    "add_layer_norm": "norm",
    "add_rms_norm": "norm",
    "bias_dropout_add": "dropout",
    "bias_gelu": "activation",
    "cross_entropy": "cross_entropy",
    "cross_entropy_gradient_": "cross_entropy",
    "cross_entropy_losses": "cross_entropy",
    "cross_entropy_statistics": "cross_entropy",
    "cross_entropy_sums": "cross_entropy",
    "layer_norm": "norm",
    "masked_softmax": "softmax",
    "rms_norm": "norm",
    "rotary": "rotary",
    "scale_cast": "optimizer",
    "squared_norm": "optimizer",
    "swiglu": "activation",
}
__all__ = [
    "adamw_",
    "add_layer_norm",
    "add_rms_norm",
    "bias_dropout_add",
    "bias_gelu",
    "cross_entropy",
    "cross_entropy_gradient_",
    "cross_entropy_losses",
    "cross_entropy_statistics",
    "cross_entropy_sums",
    "layer_norm",
    "masked_softmax",
    "rms_norm",
    "rotary",
    "scale_cast",
    "squared_norm",
    "swiglu",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"pipert.hipkernels.ops.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
