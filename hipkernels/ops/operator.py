"""Define an operator of torch's ``pipert::`` namespace: schema, implementation, fake kernel and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pipert.hipkernels.errors import KernelInputError

_PLAIN = (torch.Tensor, torch.nn.Parameter)


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
        """Compute it, with a gradient if one is wanted."""
        if torch.compiler.is_compiling() or not _plain(arguments):
            return self.op(*arguments)
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in arguments):
            if self.function is None:
                return self.op(*arguments)
            return self.function.apply(*arguments)
        return self.implementation(*arguments)


def _plain(arguments: tuple[Any, ...]) -> bool:
    """Whether nobody watches these tensors' operations."""
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return False
    if torch._C._get_tracing_state() is not None:
        return False
    return all(type(a) in _PLAIN for a in arguments if isinstance(a, torch.Tensor))


def _function(name: str, implementation: Callable[..., Any], gradients: Any, save: Any) -> Any:
    """The operator as a function of autograd."""
    methods = {
        # Without the implementation's own defaults (such as out=None), which autograd would fill in.
        "forward": staticmethod(lambda *arguments: implementation(*arguments)),
        "setup_context": staticmethod(save),
        "backward": staticmethod(gradients),
    }
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
    torch.library.impl(name, "default", implementation)
    torch.library.register_fake(name, fake)
    if gradients is not None:
        torch.library.register_autograd(name, gradients, setup_context=save)
    op = getattr(torch.ops.pipert, name.removeprefix("pipert::")).default
    # torch must see what is changed in place, to count versions.
    return op if "!" in schema else Operator(op, implementation, gradients, save)
