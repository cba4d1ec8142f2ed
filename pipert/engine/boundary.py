"""What crosses the boundary between two stages: a value of any nesting, described by a `BoundarySpec`.

Gradients flow back for those tensors that require one and that the later stages use; the others have no gradient, as in
one process. Which require one both ends read off the same specification; which are used travels with the gradients the
first time, see `pipert.engine.sizes`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch

from pipert.engine.structure import Structure, flatten, freeze, unflatten
from pipert.errors import BoundaryError


class LeafSpec(NamedTuple):
    """One tensor: everything that its receiver must know to make room for it.

    Attributes:
        shape: its sizes.
        dtype: name of its dtype, such as ``float32``.
        requires_grad: whether a gradient flows back for it.
        on_host: it lives in the CPU's memory, also where the stages compute on a GPU.
    """

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    on_host: bool

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        return DTYPES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}" + (" with gradient" if self.requires_grad else "")


#: Every dtype by its name.
DTYPES: dict[str, torch.dtype] = {
    name: dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and str(dtype) == f"torch.{name}"
}
_DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def leaf_spec(tensor: torch.Tensor) -> LeafSpec:
    """The specification of a tensor.

    Raises:
        BoundaryError: it is sparse, quantized, nested or without memory.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise BoundaryError(f"a {kind} tensor cannot cross a stage boundary; make it dense first, with .to_dense()")
    return LeafSpec(tuple(tensor.shape), _DTYPE_NAMES[tensor.dtype], tensor.requires_grad, tensor.is_cpu)


@dataclass(frozen=True)
class BoundarySpec:
    """Structure and tensors of a value that crosses a boundary; a plain value, saved as JSON.

    Attributes:
        structure: nesting and plain data, see `pipert.engine.structure`.
        tensors: one `LeafSpec` for each tensor.
    """

    structure: Structure
    tensors: tuple[LeafSpec, ...]

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(structure: Structure, tensors: tuple[LeafSpec, ...]) -> BoundarySpec:
        """The one object for this specification, with what was worked out about it before."""
        return BoundarySpec(structure, tensors)

    @cached_property
    def with_gradient(self) -> tuple[int, ...]:
        """Indices of the tensors for which a gradient flows back."""
        return tuple(i for i, tensor in enumerate(self.tensors) if tensor.requires_grad)

    @cached_property
    def gradients(self) -> tuple[LeafSpec, ...]:
        """What flows back."""
        return tuple(self.tensors[i] for i in self.with_gradient)

    def encode(self) -> bytes:
        """The specification as JSON."""
        return json.dumps([self.structure, self.tensors], separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> BoundarySpec:
        """Read `encode`'s bytes."""
        structure, tensors = json.loads(data)
        leaves = (LeafSpec(tuple(shape), dtype, grad, host) for shape, dtype, grad, host in tensors)
        return cls.of(freeze(structure), tuple(leaves))

    def __str__(self) -> str:
        return _words(self.structure, self.tensors)


def _words(structure: Structure, tensors: Sequence[LeafSpec]) -> str:
    kind, *rest = structure
    if kind == "tensor":
        return str(tensors[rest[0]])
    if kind in ("tuple", "list"):
        return f"{kind}({', '.join(_words(child, tensors) for child in rest)})"
    if kind == "dict":
        return "dict(" + ", ".join(f"{key[-1]!r}: {_words(child, tensors)}" for key, child in rest) + ")"
    if kind == "namedtuple":
        return f"{rest[0]}({', '.join(_words(child, tensors) for child in rest[1:])})"
    if kind == "dataclass":
        return f"{rest[0]}({', '.join(f'{name}={_words(child, tensors)}' for name, child in rest[1:])})"
    if kind == "registered":
        return f"{rest[0]}({', '.join(_words(child, tensors) for child in rest[2:])})"
    return repr(rest[0]) if rest else kind


class Handover(NamedTuple):
    """A value at a boundary: outside autograd, described, on its way to the next stage.

    Attributes:
        spec: its specification.
        tensors: its tensors, each object once; no autograd graph hangs on them.
    """

    spec: BoundarySpec
    tensors: list[torch.Tensor]

    @classmethod
    def of(cls, value: object) -> tuple[Handover, list[torch.Tensor]]:
        """Take a stage's output out of autograd.

        Returns:
            the hand-over, and the tensors that require gradients as they were, with their graphs.

        Raises:
            BoundaryError: the value holds something that cannot cross a boundary.
        """
        tensors, structure = flatten(value)
        spec = BoundarySpec.of(structure, tuple(map(leaf_spec, tensors)))
        roots = [tensor for tensor in tensors if tensor.requires_grad]
        return cls(spec, [tensor.detach() for tensor in tensors]), roots

    def value(self) -> Any:
        """The value, without gradients."""
        return unflatten(self.spec.structure, self.tensors)


class Entry:
    """The door through which a hand-over enters the autograd graph of the next stage, and its gradients come out.

    The tensors are used as they are, without a copy, and are no leaves: a block may change its input in place here
    exactly as it may in one process.
    """

    def __init__(self, handover: Handover) -> None:
        """Take over the hand-over's tensors."""
        self._handover: Handover | None = handover
        self._spec = handover.spec
        self._found: Sequence[torch.Tensor | None] = ()

    def value(self, anchor: torch.Tensor) -> Any:
        """The value as the stage shall see it; once.

        Args:
            anchor: any tensor that requires a gradient; it makes autograd record the entry and gets no gradient.
        """
        assert self._handover is not None
        tensors, self._handover = self._handover.tensors, None
        entered = _Enter.apply(anchor, self, [tensors[i] for i in self._spec.with_gradient])  # type: ignore[no-untyped-call]
        for i, tensor in zip(self._spec.with_gradient, entered, strict=True):
            tensors[i] = tensor
        return unflatten(self._spec.structure, tensors)

    def keep(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Called by autograd with the gradients of the tensors that have one."""
        self._found = gradients

    def gradients(self) -> list[torch.Tensor | None]:
        """The gradients that flow back, one for each of ``spec.gradients``; None where autograd found none."""
        return list(self._found or [None] * len(self._spec.gradients))


class _Enter(torch.autograd.Function):
    """Gives tensors a place in the graph. They come in a list, so autograd sees new tensors, not views of inputs."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, entry: Entry, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None]:
        ctx.entry.keep(gradients)
        return None, None, None


def room(spec: LeafSpec, device: torch.device) -> torch.Tensor:
    """Memory for a tensor of this specification, not initialised."""
    return torch.empty(spec.shape, dtype=spec.torch_dtype, device="cpu" if spec.on_host else device)


def zeros(spec: LeafSpec, device: torch.device) -> torch.Tensor:
    """A tensor of this specification filled with zeros."""
    return room(spec, device).zero_()


def check_same(found: BoundarySpec, expected: BoundarySpec, stage: int, microbatch: int) -> None:
    """Refuse an output that is not what the next stage makes room for.

    Raises:
        BoundaryError: the output's specification differs from the one that the same signature had before.
    """
    if found is not expected and found != expected:
        raise BoundaryError(
            f"stage {stage}, micro-batch {microbatch}: the output is {found}, but for inputs of the same structure, "
            f"shapes and dtypes it was {expected} before, and that is what stage {stage + 1} makes room for; if it "
            "depends on the data, use Pipeline(…, dynamic=True), which sends the sizes with every micro-batch"
        )
