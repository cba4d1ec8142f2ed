"""Define an operator of torch's ``pipert::`` namespace: schema, implementation, fake kernel and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from pipert.hipkernels.errors import KernelInputError

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_NO_TENSOR = frozenset({type(None), bool, int, float, str})
_DERIVATIVES = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)


class Operator:
    """An operator of torch, called without its dispatcher where that would only cost time.

    Going through the dispatcher and back into Python takes several times as long as a kernel for a small tensor. What
    needs it gets it: ``torch.compile`` and export, fake and other special tensors, dispatch modes, transformations.

    Args:
        op: the operator as torch knows it.
        implementation: computes it.
        gradients: see `define`.
        save: see `define`.
    """

    def __init__(
        self,
        op: Any,
        implementation: Callable[..., Any],
        gradients: Callable[..., Any] | None,
        save: Callable[..., Any],
    ) -> None:
        self.op = op
        self.implementation = implementation
        self.function = _function(op.name(), implementation, gradients, save) if gradients else None

    def __call__(self, *arguments: Any) -> Any:
        """Compute it, with a gradient if one is wanted.

        Raises:
            KernelInputError: a derivative is wanted that kernels do not have.
        """
        if torch.compiler.is_compiling():
            return self.op(*arguments)
        if self.function is not None and _transformed(arguments):
            raise KernelInputError(
                f"{self.op.name()}: kernels have no derivatives under torch.func or in forward mode; use torch's own "
                "function there, as pipert's layers do where pipert.hipkernels.usable says no"
            )
        if _watched():
            return self.op(*arguments)
        wants_gradient = False
        for argument in arguments:
            kind = type(argument)
            if kind in _PLAIN:
                wants_gradient = wants_gradient or argument.requires_grad
            elif kind not in _NO_TENSOR and isinstance(argument, torch.Tensor):
                return self.op(*arguments)
        if not wants_gradient or not torch.is_grad_enabled():
            return self.implementation(*arguments)
        if self.function is None:
            return self.op(*arguments)
        return self.function.apply(*arguments)


def _watched() -> bool:
    """Whether somebody watches operations: a dispatch mode, a transformation, a trace."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
    )


def _transformed(arguments: tuple[Any, ...]) -> bool:
    """Whether a derivative of these arguments is being computed in another way than by a backward pass."""
    if torch._C._are_functorch_transforms_active():
        if not any(level.key() in _DERIVATIVES for level in torch._C._functorch.get_interpreter_stack() or ()):
            return False
        return any(torch._C._functorch.is_functorch_wrapped_tensor(a) for a in _tensors(arguments))
    if forward_ad._current_level < 0:
        return False
    tangents = (forward_ad.unpack_dual(a).tangent for a in _tensors(arguments))  # type: ignore[no-untyped-call]
    return any(tangent is not None for tangent in tangents)


def _tensors(arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    return [a for a in arguments if isinstance(a, torch.Tensor)]


def _function(name: str, implementation: Callable[..., Any], gradients: Any, save: Any) -> Any:
    """The operator as a function of autograd.

    In one piece: with ``setup_context`` apart, which only transformations need, torch inspects signatures every call.
    """

    def forward(ctx: Any, *arguments: Any) -> Any:
        results = implementation(*arguments)
        save(ctx, arguments, results)
        return results

    methods = {"forward": staticmethod(forward), "backward": staticmethod(gradients)}
    return type(name.replace("::", "_"), (torch.autograd.Function,), methods)


def _save_nothing(ctx: Any, inputs: Any, output: Any) -> None:
    pass


def once_only(ctx: Any, *_: Any) -> Any:
    """``gradients`` of what computes gradients itself.

    Raises:
        KernelInputError: always.
    """
    raise KernelInputError(
        "the kernels have no second derivatives; set PIPERT_KERNELS=reference, with which torch's own functions run"
    )


def define(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    gradients: Callable[..., Any] | None = None,
    save: Callable[..., Any] = _save_nothing,
) -> Any:
    """Register an operator for all devices.

    Args:
        schema: such as ``"name(Tensor x) -> Tensor"``. Results are new tensors that share no memory with anything else.
        implementation: computes it; chooses between kernels and reference itself.
        fake: the results' shapes, dtypes and devices, for meta tensors and ``torch.compile``.
        gradients: ``(ctx, *gradients of the results) -> gradients of the arguments``. Without it the operator has no
            gradient; `once_only` is that of an operator that computes gradients itself.
        save: ``(ctx, arguments, results)``, before ``gradients``.

    Returns:
        the operator, callable.
    """
    name = f"pipert::{schema.partition('(')[0]}"
    torch.library.define(name, schema.removeprefix(schema.partition("(")[0]))
    op = getattr(torch.ops.pipert, name.removeprefix("pipert::")).default
    torch.library.impl(name, "default", _counting(op, implementation) if "!" in schema else implementation)
    torch.library.register_fake(name, fake)
    if gradients is not None:
        torch.library.register_autograd(name, gradients, setup_context=save)
    # The short cut is for operators that change nothing, and it looks at tensors, not into lists of them.
    return op if "!" in schema or "Tensor[]" in schema else Operator(op, implementation, gradients, save)


def _counting(op: Any, implementation: Callable[..., Any]) -> Callable[..., Any]:
    """The implementation of an operator that writes into arguments, which tells autograd that it did."""
    written = [i for i, a in enumerate(op._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]

    def run(*arguments: Any) -> Any:
        result = implementation(*arguments)
        increment_version([arguments[i] for i in written if arguments[i] is not None])
        return result

    return run
