"""The backward in two halves: what belongs to weight gradients alone is put off until it is asked for.

While a stage runs a micro-batch forward, within `deferring`, every product with a leaf weight records a node that
computes the same numbers. In the backward this node computes the gradient of its input and keeps what the weight's
needs: its input and its output's gradient. Everything else that the forward kept is free then. Later
`Deferred.accumulate` multiplies the two and adds the products up as autograd would.

How products are found, which costs Python for every layer of every micro-batch:

* ``nn.Linear`` and its subclasses that keep its ``forward``: that method is replaced while a block runs;
* any other layer that computes its product as ``self.multiply(x, weight, bias)``, where its class says
  ``multiply = staticmethod(F.linear)``: that attribute is replaced. So a layer of one's own takes part;
* every other ``F.linear``, whoever calls it: found by looking at all torch functions that a block calls. That is ten
  times as slow, so it is done when a block runs for the first time, and later only if something was found.

What is not put off is computed in the first half, by autograd as ever: weights of norms, convolutions and embeddings,
raw parameters, and a linear layer whose weight is no leaf or has hooks of its own, or which runs inside a
differentiable backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from pipert.engine.backward import run_backward
from pipert.engine.parts import Part, Product, Ready, Sum, add_parts, own_leaf

_AS_EVER = nullcontext()


class Products:
    """The places where a block computes products with weights.

    Args:
        module: the block.

    Attributes:
        others: whether it also calls ``F.linear`` in ways that are not known beforehand; None until it has run.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self.others: bool | None = None
        layers = () if module is None else module.modules()
        self._places = [(layer, name) for layer in layers if (name := _place(layer))]

    def replace(self, deferred: Deferred) -> list[tuple[dict[str, Any], str, Any]]:
        """Let the layers put off what they can; returns what was there before, for `put_back`."""
        before = []
        for layer, name in self._places:
            attributes = layer.__dict__
            before.append((attributes, name, attributes.get(name)))
            attributes[name] = deferred.multiply if name == "multiply" else _Forward(layer, deferred)
        return before


def put_back(before: list[tuple[dict[str, Any], str, Any]]) -> None:
    """Undo `Products.replace`."""
    for attributes, name, value in before:
        if value is None:
            del attributes[name]
        else:
            attributes[name] = value


def _place(layer: nn.Module) -> str | None:
    """The attribute of a layer through which it computes its product, if it has one that may be replaced."""
    kind = type(layer)
    if getattr(kind, "multiply", None) is F.linear:
        return None if "multiply" in layer.__dict__ else "multiply"
    plain = isinstance(layer, nn.Linear) and kind.forward is nn.Linear.forward and "forward" not in layer.__dict__
    return "forward" if plain and "weight" in layer._parameters and "bias" in layer._parameters else None


class _Forward:
    """Stands in for the ``forward`` of an ``nn.Linear``."""

    __slots__ = ("_deferred", "_parameters")

    def __init__(self, layer: nn.Module, deferred: Deferred) -> None:
        self._parameters, self._deferred = layer._parameters, deferred

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        parameters = self._parameters
        weight = parameters["weight"]
        assert weight is not None
        return self._deferred.multiply(input, weight, parameters["bias"])


class Deferred:
    """The weight gradients of one micro-batch on one stage that are put off.

    The parts of a weight used several times are added up in the order in which autograd would, then added to ``.grad``
    at once; so the result is bitwise that of a whole backward, if weights that are used in other ways too are used
    twice at most.
    """

    def __init__(self) -> None:
        self._parts: dict[torch.Tensor, list[Part]] = {}
        self._task: int | None = None
        self._seen: list[Products] = []

    def saw(self, products: Products) -> None:
        """The forward ran a block with these products."""
        if products not in self._seen:
            self._seen.append(products)

    def multiply(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``F.linear``, whose weight gradients are put off if that leaves all numbers as they are."""
        if not torch.is_grad_enabled() or not _splits(input, weight, bias):
            return F.linear(input, weight, bias)
        parts = self._parts
        parts.setdefault(weight, [])
        if bias is not None and own_leaf(bias):
            parts.setdefault(bias, [])
        dtype = _autocast_dtype(input.device.type)
        if dtype is not None:
            input = input.to(dtype)
        if input.is_contiguous():
            output: torch.Tensor = _apply(input, weight, bias, self)
            return output
        rows = input if input.dim() == 2 else input.reshape(-1, input.shape[-1])
        output = _apply(rows, weight, bias, self)
        return output if input.dim() == 2 else output.view(*input.shape[:-1], len(weight))

    @property
    def putting_off(self) -> bool:
        """Whether the first half runs; not a backward of its own that the model starts, in it or before."""
        return self._task is not None and self._task == torch._C._current_graph_task_id()

    def put_off(self, parameter: torch.Tensor, part: Product | Sum) -> None:
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
        with self._set_aside(), ExitStack() as again:
            for products in self._seen:
                again.enter_context(deferring(self, products))
            run_backward(roots, seeds)
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
                    self._parts[parameter].append(Ready(found))

    @torch.no_grad()
    def accumulate(self) -> None:
        """Compute what was put off, one parameter after the other, and add it to ``.grad``; keeps nothing."""
        while self._parts:
            parameter = next(iter(self._parts))
            if parts := self._parts.pop(parameter):
                add_parts(parameter, parts)


def _node(root: torch.Tensor | GradientEdge) -> Node:
    return root.node if isinstance(root, GradientEdge) else get_gradient_edge(root).node


def deferring(deferred: Deferred | None, products: Products | None = None) -> AbstractContextManager[object]:
    """Within it products with weights get a backward in two halves; None: as ever.

    Args:
        deferred: where what is put off is kept.
        products: where they are; default: anywhere.
    """
    return _AS_EVER if deferred is None else _Deferring(deferred, products or Products())


class _Deferring:
    """Replaces the products of a block while it runs."""

    __slots__ = ("_before", "_deferred", "_mode", "_products")

    def __init__(self, deferred: Deferred, products: Products) -> None:
        self._deferred, self._products = deferred, products
        self._mode: _Looking | None = None

    def __enter__(self) -> None:
        self._deferred.saw(self._products)
        self._before = self._products.replace(self._deferred)
        if self._products.others is not False:
            self._mode = _Looking(self._deferred)
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *reason: Any) -> None:
        put_back(self._before)
        if self._mode is not None:
            self._mode.__exit__(*reason)  # type: ignore[no-untyped-call]
            self._products.others = self._products.others or self._mode.found


class _Looking(TorchFunctionMode):
    """Sees every torch function of this thread.

    Attributes:
        found: whether a product was among them.
    """

    def __init__(self, deferred: Deferred) -> None:
        super().__init__()
        self.found = False
        self._deferred = deferred

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.linear and torch.is_grad_enabled():
            self.found = True
            return self._deferred.multiply(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _splits(value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether `_Linear` computes this layer's gradients exactly as torch does: as a product of two matrices."""
    return (
        not torch._C._are_functorch_transforms_active()
        and own_leaf(weight)
        and _plain(value)
        and _plain(weight)
        and value.dim() >= 2
        and weight.dim() == 2
        and weight.is_contiguous()
        and (bias is None or (_plain(bias) and bias.shape == weight.shape[:1]))
        and (value.dim() == 2 or value.is_contiguous() or (bias is None and value.requires_grad))
        and value.numel() > 0
        and (
            (value.dtype is weight.dtype and (bias is None or bias.dtype is weight.dtype))
            or torch.is_autocast_enabled(value.device.type)
        )
    )


def _plain(tensor: torch.Tensor) -> bool:
    """A tensor without rules of its own; not in double precision where autocast would leave that alone."""
    return (
        type(tensor) in _KNOWN
        and tensor.layout is torch.strided
        and tensor.is_floating_point()
        and not (tensor.dtype is torch.float64 and torch.is_autocast_enabled(tensor.device.type))
    )


_KNOWN = (torch.Tensor, nn.Parameter)


def _autocast_dtype(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


class _Linear(torch.autograd.Function):
    """``F.linear`` whose weight gradients can be put off; the numbers are bitwise the same."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, deferred: Deferred
    ) -> torch.Tensor:
        dtype = value.dtype
        if weight.dtype is dtype:
            weight_used, bias_used = weight, bias
        else:  # autocast, whose own cache of weights would forget their gradients
            weight_used, bias_used = weight.to(dtype), None if bias is None else bias.to(dtype)
        ctx.save_for_backward(value, weight_used)
        ctx.weight, ctx.bias, ctx.deferred = weight, bias, deferred
        if value.dim() == 2:
            return F.linear(value, weight_used, bias_used)
        rows = F.linear(value.view(-1, value.shape[-1]), weight_used, bias_used)
        # In place, because a custom function must not return a view if that may be changed in place later.
        return rows.resize_((*value.shape[:-1], rows.shape[-1]))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        value, weight = ctx.saved_tensors
        deferred: Deferred = ctx.deferred
        if torch.is_grad_enabled():
            weight = ctx.weight.to(value.dtype)  # the backward is differentiated itself
        shape = value.shape
        if len(shape) != 2:
            value, gradient = value.view(-1, shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        of_value, of_weight, of_bias = None, None, None
        if ctx.needs_input_grad[0]:
            of_value = _times(gradient, weight, value)
            of_value = of_value if len(shape) == 2 else of_value.view(shape)
        putting_off = deferred.putting_off
        if putting_off:
            deferred.put_off(ctx.weight, Product(value, gradient))
        else:
            of_weight = Product(value, gradient).compute().to(ctx.weight.dtype)
        if ctx.needs_input_grad[2]:
            if putting_off and own_leaf(ctx.bias):
                deferred.put_off(ctx.bias, Sum(gradient))
            else:
                of_bias = Sum(gradient).compute().to(ctx.bias.dtype)
        return of_value, of_weight, of_bias, None


#: ``_Linear.apply`` without torch's part for its function transformations, in which `_splits` lets nothing be put off.
_apply: Callable[..., torch.Tensor] = super(torch.autograd.Function, _Linear).apply


def _times(gradient: torch.Tensor, weight: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The value's gradient, in the order of memory in which torch computes it."""
    if value.stride() == (1, value.shape[0]):
        return weight.t().mm(gradient.t()).t()
    return gradient.mm(weight)
