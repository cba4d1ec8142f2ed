"""Define an operator of torch's ``pipert::`` namespace: schema, implementation, fake kernel and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def define(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    gradients: Callable[..., Any] | None = None,
    save: Callable[..., Any] | None = None,
) -> Any:
    """Register an operator for all devices.

    Args:
        schema: such as ``"name(Tensor x) -> Tensor"``. Results are new tensors that share no memory with anything else.
        implementation: computes it; chooses between kernels and reference itself.
        fake: the results' shapes, dtypes and devices, for meta tensors and ``torch.compile``.
        gradients: ``(ctx, *gradients of the results) -> gradients of the arguments``. Without it the operator has no
            gradient.
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
    return getattr(torch.ops.pipert, name.removeprefix("pipert::")).default
