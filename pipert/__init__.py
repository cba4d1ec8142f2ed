"""pipert: a pipeline-parallel runtime whose layout is invisible in the numbers.

Importing this package is quick: it loads no torch, touches no device and starts no MPI. The public names below are
resolved on first use (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pipert.comm.local import run_ranks
    from pipert.comm.mesh import Mesh
    from pipert.engine.auto import AutoOptions
    from pipert.engine.pipeline import Pipeline
    from pipert.engine.result import StepResult
    from pipert.layers.parallelize import parallelize
    from pipert.optim.adamw import ZeroAdamW
    from pipert.optim.loss_scale import LossScale
    from pipert.optim.precision import Precision
    from pipert.optim.zero import ZeroOptimizer

_HOMES = {
    "AutoOptions": "pipert.engine.auto",
    "LossScale": "pipert.optim.loss_scale",
    "Mesh": "pipert.comm.mesh",
    "Pipeline": "pipert.engine.pipeline",
    "Precision": "pipert.optim.precision",
    "StepResult": "pipert.engine.result",
    "ZeroAdamW": "pipert.optim.adamw",
    "ZeroOptimizer": "pipert.optim.zero",
    "parallelize": "pipert.layers.parallelize",
    "run_ranks": "pipert.comm.local",
}

__all__ = [
    "AutoOptions",
    "LossScale",
    "Mesh",
    "Pipeline",
    "Precision",
    "StepResult",
    "ZeroAdamW",
    "ZeroOptimizer",
    "__version__",
    "parallelize",
    "run_ranks",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its home module the first time it is used."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'pipert' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
