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
    from pipert.hipkernels.runtime import prepare, usable

_HOMES = {
    "adamw_": "ops.optimizer",
    "add_layer_norm": "ops.norm",
    "add_rms_norm": "ops.norm",
    "bias_dropout_add": "ops.dropout",
    "bias_gelu": "ops.activation",
    "cross_entropy": "ops.cross_entropy",
    "cross_entropy_gradient_": "ops.cross_entropy",
    "cross_entropy_losses": "ops.cross_entropy",
    "cross_entropy_statistics": "ops.cross_entropy",
    "cross_entropy_sums": "ops.cross_entropy",
    "layer_norm": "ops.norm",
    "masked_softmax": "ops.softmax",
    "prepare": "runtime",
    "rms_norm": "ops.norm",
    "rotary": "ops.rotary",
    "scale_cast": "ops.optimizer",
    "squared_norm": "ops.optimizer",
    "swiglu": "ops.activation",
    "usable": "runtime",
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
    "prepare",
    "rms_norm",
    "rotary",
    "scale_cast",
    "squared_norm",
    "swiglu",
    "usable",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        found = getattr(importlib.import_module(f"pipert.hipkernels.{_HOMES[name]}"), name)
        return globals().setdefault(name, found)  # looked up once
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
