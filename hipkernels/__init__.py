"""Fused kernels from one source for AMD GPUs, NVIDIA GPUs and CPUs.

The operations are functions of torch tensors with gradients, usable under ``torch.compile`` and on meta tensors. They
run compiled kernels where those exist (built at first use) and the torch code of `pipert.hipkernels.reference`
elsewhere. See ``docs/kernels.md``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipert.hipkernels.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm

_HOMES = {
    "add_layer_norm": "norm",
    "add_rms_norm": "norm",
    "layer_norm": "norm",
    "rms_norm": "norm",
}
__all__ = ["add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"pipert.hipkernels.ops.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
