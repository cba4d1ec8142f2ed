"""In which types weights, gradients and master weights are kept: one table of what goes together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from pipert.errors import ConfigError

#: Half-precision types: too few digits to add up many small gradients, or small updates.
HALF = (torch.bfloat16, torch.float16)

#: What goes together (parameters, gradients, master weights), and what for. fp16 gradients are never added up in fp16:
#: sums leave its range.
LEGAL: dict[tuple[torch.dtype, torch.dtype, torch.dtype], str] = {
    (torch.float64, torch.float64, torch.float64): "fp64: tests",
    (torch.float32, torch.float32, torch.float32): "fp32",
    (torch.bfloat16, torch.float32, torch.float32): "bf16: half the traffic, sums and updates of fp32",
    (torch.bfloat16, torch.bfloat16, torch.float32): "half as much to reduce; for few micro-batches",
    (torch.bfloat16, torch.bfloat16, torch.bfloat16): "torch's own optimizers on bf16 weights; small updates are lost",
    (torch.float16, torch.float32, torch.float32): "fp16: for GPUs without bf16; the loss is scaled",
}


@dataclass(frozen=True)
class Precision:
    """The types of a model's floating-point weights, and of what training keeps beside them.

    Activations, and so what crosses a stage boundary, have the type of the weights.

    Attributes:
        parameters: of the weights that forward and backward compute with.
        gradients: of ``.grad``, in which the gradients of micro-batches and replicas are added up; default float32
            where parameters are half precision, else theirs.
        master: of the weights that the optimizer updates; where it is not that of the parameters, these are rounded
            copies. Default as for gradients.

    Raises:
        ConfigError: the three are not in `LEGAL`.
    """

    parameters: torch.dtype = torch.float32
    gradients: torch.dtype | None = None
    master: torch.dtype | None = None

    def __post_init__(self) -> None:
        wide = torch.float32 if self.parameters in HALF else self.parameters
        for name in ("gradients", "master"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, wide)
        if self._dtypes not in LEGAL:
            rows = "; ".join(map(_words, LEGAL))
            raise ConfigError(f"parameters, gradients, master = {_words(self._dtypes)} do not go together; use {rows}")

    @property
    def _dtypes(self) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        assert self.gradients is not None
        assert self.master is not None
        return self.parameters, self.gradients, self.master

    @staticmethod
    def of(value: Precision | str | None, dtype: torch.dtype | None = None) -> Precision | None:
        """What the arguments ``precision`` and ``dtype`` of `pipert.Pipeline` say together.

        Returns:
            None: every parameter keeps the type that the model declares, or ``dtype`` is of no known precision.

        Raises:
            ConfigError: no precision has this name, or the two contradict each other.
        """
        if value is None:
            return next((preset for preset in NAMED.values() if preset.parameters == dtype), None)
        preset = NAMED.get(value) if isinstance(value, str) else value
        if not isinstance(preset, Precision):
            raise ConfigError(f"precision = {value!r:.60} is none of {', '.join(NAMED)}, and no Precision(…)")
        if dtype is not None and dtype != preset.parameters:
            raise ConfigError(
                f"dtype = {dtype} contradicts precision = {value}, whose parameters are {preset.parameters}; leave "
                "out dtype"
            )
        return preset

    @property
    def has_master(self) -> bool:
        """Whether the optimizer updates other weights than the model computes with."""
        return self.master != self.parameters

    def state_bytes(self, moments: int = 2) -> int:
        """Bytes that training keeps for each parameter: itself, its gradient, moments and master."""
        parameter, gradient, master = (dtype.itemsize for dtype in self._dtypes)
        return parameter + gradient + master * (moments + self.has_master)

    def __str__(self) -> str:
        return _words(self._dtypes)


def _words(dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


#: Precisions by name.
NAMED: dict[str, Precision] = {
    "fp32": Precision(torch.float32),
    "bf16": Precision(torch.bfloat16),
    "fp16": Precision(torch.float16),
    "fp64": Precision(torch.float64),
}


def accumulates_in(parameter: torch.Tensor) -> torch.dtype:
    """The type of a parameter's ``.grad``."""
    dtype: torch.dtype | None = parameter.grad_dtype
    return dtype or parameter.dtype


def accumulate(parameters: Iterable[torch.Tensor], precision: Precision | None = None) -> None:
    """Let autograd add up gradients in the precision's type; without one, those of half-precision parameters in fp32.

    Each gradient is converted before it is added. A gradient that is there already is converted too. Frozen parameters
    are prepared as well: they may be trained later.
    """
    for parameter in parameters:
        if not parameter.is_floating_point():
            continue
        wanted = torch.float32 if parameter.dtype in HALF else parameter.dtype
        if precision is not None and precision.parameters == parameter.dtype and precision.gradients is not None:
            wanted = precision.gradients
        if accumulates_in(parameter) == wanted:
            continue
        before, parameter.grad = parameter.grad, None
        parameter.grad_dtype = wanted
        parameter.grad = before if before is None else before.to(wanted)
