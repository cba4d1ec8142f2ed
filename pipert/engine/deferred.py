"""The backward in two halves: what belongs to weight gradients alone is put off until it is asked for.

While a stage runs a micro-batch forward, `deferring` looks at every ``F.linear`` with a leaf weight, whoever calls it,
and records a node that computes the same numbers. In the backward this node computes the gradient of its input and
keeps what the weight's needs: its input and its output's gradient. Everything else that the forward kept is free then.
Later `Deferred.accumulate` multiplies the two and lets autograd add the products up.

What is not put off is computed in the first half, by autograd as ever: weights of norms, convolutions and embeddings,
raw parameters, and a linear layer whose weight is no leaf or has hooks of its own, or which runs inside a
differentiable backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward, get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_AS_EVER = nullcontext()


class _Product(NamedTuple):
    """A weight's gradient to be: two matrices of as many rows; the gradient is ``gradient.T @ value``."""

    value: torch.Tensor
    gradient: torch.Tensor

    def compute(self) -> torch.Tensor:
        return self.gradient.t().mm(self.value)


class _Sum(NamedTuple):
    """A bias's gradient to be: its output's, summed over all dimensions but the last."""

    gradient: torch.Tensor

    def compute(self) -> torch.Tensor:
        return self.gradient.sum_to_size(self.gradient.shape[-1:])


class _Ready(NamedTuple):
    """A gradient that is there already: what autograd found for a weight that is also used in other ways."""

    gradient: torch.Tensor

    def compute(self) -> torch.Tensor:
        return self.gradient


class Deferred:
    """The weight gradients of one micro-batch on one stage that are put off.

    The parts of a weight used several times are added up in the order in which autograd would, then added to ``.grad``
    at once; so the result is bitwise that of a whole backward, if weights that are used in other ways too are used
    twice at most.
    """

    def __init__(self) -> None:
        self._parts: dict[torch.Tensor, list[_Product | _Sum | _Ready]] = {}
        self._task: int | None = None

    def expect(self, parameter: torch.Tensor) -> None:
        """The forward used a parameter whose gradient will be put off."""
        self._parts.setdefault(parameter, [])

    @property
    def putting_off(self) -> bool:
        """Whether the first half runs; not a backward of its own that the model starts, in it or before."""
        return self._task is not None and self._task == torch._C._current_graph_task_id()

    def put_off(self, parameter: torch.Tensor, part: _Product | _Sum) -> None:
        """Keep a part of a parameter's gradient for later."""
        self._parts.setdefault(parameter, []).append(part)

    def first_half(self, roots: Sequence[torch.Tensor | GradientEdge], seeds: Sequence[torch.Tensor]) -> None:
        """Run the backward from the roots, without what is put off.

        What autograd finds of gradients that are otherwise put off waits with them, so that each is added in one
        piece.
        """

        def begin(_: object) -> None:
            self._task = torch._C._current_graph_task_id()

        hooks = [_node(root).register_prehook(begin) for root in roots]
        with self._set_aside(), deferring(self):
            # torch.autograd.backward is a torch function itself: the mode would be off while it runs, and a forward
            # that is run again within it would not be the same.
            _engine_run_backward(
                tuple(roots), tuple(seeds), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        for hook in hooks:
            hook.remove()

    @contextmanager
    def _set_aside(self) -> Iterator[None]:
        before = [(parameter, parameter.grad) for parameter in self._parts]
        for parameter, _ in before:
            parameter.grad = None
        try:
            yield
        finally:
            self._task = None
            for parameter, gradient in before:
                found, parameter.grad = parameter.grad, gradient
                if found is not None:
                    self._parts[parameter].append(_Ready(found))

    def accumulate(self) -> None:
        """Compute what was put off, one parameter after another, and add it to ``.grad``; keeps nothing."""
        while self._parts:
            parameter = next(iter(self._parts))
            parts = self._parts.pop(parameter)
            if parts:
                gradients = [part.compute().to(parameter.dtype) for part in parts]
                torch.autograd.backward([parameter] * len(parts), gradients)


def _node(root: torch.Tensor | GradientEdge) -> Node:
    return root.node if isinstance(root, GradientEdge) else get_gradient_edge(root).node


def deferring(deferred: Deferred | None) -> AbstractContextManager[object]:
    """Within it linear layers get a backward in two halves; None: as ever."""
    return _AS_EVER if deferred is None else _Deferring(deferred)


class _Deferring(TorchFunctionMode):
    """Sees every torch function of this thread."""

    def __init__(self, deferred: Deferred) -> None:
        super().__init__()
        self._deferred = deferred

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.linear and torch.is_grad_enabled():
            return self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not _splits(input, weight, bias):
            return F.linear(input, weight, bias)
        for parameter in (weight, bias):
            if parameter is not None and _own_leaf(parameter):
                self._deferred.expect(parameter)
        dtype = _autocast_dtype(input.device.type) or input.dtype
        rows = (input if input.dim() == 2 else input.reshape(-1, input.shape[-1])).to(dtype)
        output: torch.Tensor = _Linear.apply(rows, weight, bias, self._deferred)  # type: ignore[no-untyped-call]
        if input.dim() == 2:
            return output
        shape = (*input.shape[:-1], len(weight))
        # As torch does, which matters to what is done in place next.
        return output.view(shape) if bias is not None else torch.ops.aten._unsafe_view(output, shape)


def _splits(value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether `_Linear` computes this layer's gradients exactly as torch does: as a product of two matrices."""
    tensors = [tensor for tensor in (value, weight, bias) if tensor is not None]
    as_rows = value.dim() == 2 or value.is_contiguous() or (bias is None and value.requires_grad)
    return (
        all(map(_plain, tensors))
        and value.dim() >= 2
        and weight.dim() == 2
        and (bias is None or bias.shape == weight.shape[:1])
        and _own_leaf(weight)
        and weight.is_contiguous()
        and as_rows
        and value.numel() > 0
        and (len({tensor.dtype for tensor in tensors}) == 1 or _autocast_dtype(value.device.type) is not None)
    )


def _plain(tensor: torch.Tensor) -> bool:
    """A tensor without rules of its own; not in double precision where autocast would leave that alone."""
    known = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    doubled = tensor.dtype is torch.float64 and torch.is_autocast_enabled(tensor.device.type)
    return known and tensor.is_floating_point() and not doubled


def _autocast_dtype(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _own_leaf(tensor: torch.Tensor) -> bool:
    """A leaf without hooks, which would see gradients in the first half that are not there yet."""
    hooks = tensor._backward_hooks or tensor._post_accumulate_grad_hooks
    return tensor.requires_grad and tensor.is_leaf and not hooks


class _Linear(torch.autograd.Function):
    """``F.linear`` of a matrix, whose weight gradients can be put off; the numbers are bitwise the same."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, deferred: Deferred
    ) -> torch.Tensor:
        # In the value's type, which under autocast is another. Its own cache of weights would forget their gradients.
        weight_used, bias_used = weight.to(value.dtype), None if bias is None else bias.to(value.dtype)
        ctx.save_for_backward(value, weight_used)
        ctx.weight, ctx.bias, ctx.deferred = weight, bias, deferred
        return F.linear(value, weight_used, bias_used)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        value, weight = ctx.saved_tensors
        deferred: Deferred = ctx.deferred
        if torch.is_grad_enabled():
            weight = ctx.weight.to(value.dtype)  # the backward is differentiated itself
        of_value = _times(gradient, weight, value) if ctx.needs_input_grad[0] else None
        of_weight, of_bias = None, None
        if deferred.putting_off:
            deferred.put_off(ctx.weight, _Product(value, gradient))
        else:
            of_weight = _Product(value, gradient).compute().to(ctx.weight.dtype)
        if ctx.needs_input_grad[2]:
            if deferred.putting_off and _own_leaf(ctx.bias):
                deferred.put_off(ctx.bias, _Sum(gradient))
            else:
                of_bias = _Sum(gradient).compute().to(ctx.bias.dtype)
        return of_value, of_weight, of_bias, None


def _times(gradient: torch.Tensor, weight: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The value's gradient, in the order of memory in which torch computes it."""
    if value.stride() == (1, value.shape[0]):
        return weight.t().mm(gradient.t()).t()
    return gradient.mm(weight)
