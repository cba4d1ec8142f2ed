"""What an optimizer step does over flat buffers and gradient buckets; nothing here has a gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from pipert.hipkernels.errors import KernelInputError
from pipert.hipkernels.ops.operator import define
from pipert.hipkernels.ops.tensors import apart
from pipert.hipkernels.reference import optimizer as reference
from pipert.hipkernels.runtime import DTYPES, Library, library_for, pointer_of

#: Elements of a chunk of `squared_norm`: the sum over a tensor is cut at multiples of it.
CHUNK = 1 << 15


def adamw_(
    param: torch.Tensor | None,
    master: torch.Tensor,
    average: torch.Tensor,
    square: torch.Tensor,
    grad: torch.Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    scale: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
) -> None:
    """One step of AdamW (Loshchilov and Hutter 2019) over flat buffers, in place, in one pass over memory.

    Args:
        param: the model's copy of the weights, fp32, bf16 or fp16; receives the new master. None: there is no copy.
        master: fp32 weights.
        average: fp32, running mean of the gradient.
        square: fp32, running mean of its square.
        grad: fp32, bf16 or fp16; left as it is.
        step: number of this step, from 1.
        lr: learning rate.
        betas: decay of average and of square.
        eps: added to the root of square.
        weight_decay: decoupled.
        scale: fp32 scalar on the device; the gradient is multiplied by it (clipping, loss scale). None: 1.
        skip: fp32 scalar on the device; if not 0, nothing changes. None: 0.

    Raises:
        KernelInputError: the tensors do not go together; nothing was changed.
    """
    if step < 1 or not 0.0 <= betas[0] < 1.0 or not 0.0 <= betas[1] < 1.0:
        raise KernelInputError(f"adamw_: step={step}, betas={betas}; steps count from 1, betas are in [0, 1)")
    _check_buffers(param, master, average=average, square=square, grad=grad)
    for name, scalar in (("scale", scale), ("skip", skip)):
        _check_scalar("adamw_", name, scalar, master)
    step_size, root = lr / (1.0 - betas[0] ** step), math.sqrt(1.0 - betas[1] ** step)
    numbers = (float(betas[0]), float(betas[1]), float(eps), float(lr * weight_decay), step_size, root)
    adamw_op(param, master, average, square, grad, scale, skip, *numbers)


def squared_norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Sum of the squares of all elements of all tensors.

    Args:
        tensors: any shapes and floating-point dtypes, on one device.

    Returns:
        float64 scalar on that device (the CPU for no tensors); the same in every run.

    Raises:
        KernelInputError: tensors on several devices, or not floating point.
    """
    tensors = list(tensors)
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1 or not all(tensor.is_floating_point() for tensor in tensors):
        kinds = sorted({f"{tensor.dtype} on {tensor.device}" for tensor in tensors})
        raise KernelInputError(f"squared_norm: {', '.join(kinds)}; all must be floating point on one device")
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    return squared_norm_op([tensor.detach() for tensor in tensors])  # type: ignore[no-any-return]


def scale_cast(
    x: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    factor: float = 1.0,
    overflow: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x * scale * factor`` in another dtype, and whether that overflowed.

    Args:
        x: fp32, bf16 or fp16, any shape (others by the torch reference).
        dtype: of the result; default that of out, or of x.
        out: memory for the result, contiguous, of x's shape; may be x itself.
        scale: fp32 scalar on the device. None: 1.
        factor: a number.
        overflow: fp32 scalar on the device; becomes 1 if any result is infinite or NaN, otherwise stays as it is.

    Returns:
        out, or a new tensor.

    Raises:
        KernelInputError: the tensors do not go together.
    """
    if out is None:
        out = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    if out.shape != x.shape or out.device != x.device or dtype not in (None, out.dtype) or not out.is_contiguous():
        raise KernelInputError(
            f"scale_cast: out is {out.dtype} {tuple(out.shape)} on {out.device} with strides {out.stride()}; it must "
            f"be contiguous {dtype or out.dtype} {tuple(x.shape)} on {x.device}"
        )
    for name, scalar in (("scale", scale), ("overflow", overflow)):
        _check_scalar("scale_cast", name, scalar, x)
    scale_cast_op(out, x.detach(), scale, float(factor), overflow)
    return out


def _check_buffers(param: torch.Tensor | None, master: torch.Tensor, **others: torch.Tensor) -> None:
    named = {"master": master, **others, **({} if param is None else {"param": param})}
    for name, buffer in named.items():
        allowed = tuple(DTYPES) if name in ("param", "grad") else (torch.float32,)
        like = buffer.numel() == master.numel() and buffer.device == master.device and buffer.is_contiguous()
        if not like or (buffer.dtype not in allowed and master.dtype != torch.float64):
            raise KernelInputError(
                f"adamw_: {name} is {buffer.dtype} {tuple(buffer.shape)} on {buffer.device}, strides {buffer.stride()}"
                f"; it must be contiguous, {' or '.join(map(str, allowed))}, with {master.numel()} elements on "
                f"{master.device}"
            )


def _check_scalar(operation: str, name: str, scalar: torch.Tensor | None, like: torch.Tensor) -> None:
    if scalar is None:
        return
    if scalar.numel() != 1 or scalar.dtype != torch.float32 or scalar.device != like.device:
        raise KernelInputError(
            f"{operation}: {name} is {scalar.dtype} {tuple(scalar.shape)} on {scalar.device}; "
            f"it must be one float32 on {like.device}"
        )


def _adamw(
    param: torch.Tensor | None,
    master: torch.Tensor,
    average: torch.Tensor,
    square: torch.Tensor,
    grad: torch.Tensor,
    scale: torch.Tensor | None,
    skip: torch.Tensor | None,
    *numbers: float,
) -> None:
    library = library_for(master, average, square, grad, param)
    if library is None:
        flat = [tensor if tensor is None else tensor.view(-1) for tensor in (param, master, average, square, grad)]
        reference.adamw(*flat, scale, skip, *numbers)  # type: ignore[call-arg, arg-type]
        return
    codes = DTYPES[master.dtype if param is None else param.dtype], DTYPES[grad.dtype]
    library.run("adamw", param, master, average, square, grad, master.numel(), *numbers, scale, skip, *codes)


def _squared_norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    library = library_for(*tensors)
    if library is None:
        return reference.squared_norm(tensors)
    dense = [tensor.contiguous() for tensor in tensors if tensor.numel()]
    kinds = sorted({tensor.dtype for tensor in dense}, key=DTYPES.__getitem__)
    results = tensors[0].new_zeros(max(len(kinds), 1), dtype=torch.float64)
    for result, dtype in zip(results, kinds, strict=False):
        _squared_norm_of(library, result, [tensor for tensor in dense if tensor.dtype == dtype])
    return results.sum()


def _squared_norm_of(library: Library, result: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Into ``result``, for tensors of one dtype."""
    rows = [
        (pointer_of("squared_norm", tensor) + start * tensor.element_size(), min(CHUNK, tensor.numel() - start))
        for tensor in tensors
        for start in range(0, tensor.numel(), CHUNK)
    ]
    table = torch.tensor(rows, dtype=torch.int64).to(result.device)
    workspace = result.new_empty(len(rows))
    library.run(
        "squared_norm",
        result,
        workspace,
        table,
        len(rows),
        DTYPES[tensors[0].dtype],
        work=sum(map(torch.numel, tensors)),
    )


def _scale_cast(
    out: torch.Tensor, x: torch.Tensor, scale: torch.Tensor | None, factor: float, overflow: torch.Tensor | None
) -> None:
    library = library_for(x, out)
    if library is None:
        reference.scale_cast(out, x, scale, factor, overflow)
        return
    apart("scale_cast", out, (x,))
    codes = DTYPES[x.dtype], DTYPES[out.dtype]
    library.run("scale_cast", out, x.contiguous(), x.numel(), scale, factor, overflow, *codes)


adamw_op = define(
    "adamw_(Tensor(a!)? param, Tensor(b!) master, Tensor(c!) average, Tensor(d!) square, Tensor grad, Tensor? scale, "
    "Tensor? skip, float beta1, float beta2, float eps, float decay, float step_size, float root) -> ()",
    _adamw,
    lambda *arguments: None,
)
squared_norm_op = define(
    "squared_norm(Tensor[] tensors) -> Tensor",
    _squared_norm,
    lambda tensors: tensors[0].new_empty((), dtype=torch.float64),
)
scale_cast_op = define(
    "scale_cast_(Tensor(a!) out, Tensor x, Tensor? scale, float factor, Tensor(b!)? overflow) -> ()",
    _scale_cast,
    lambda *arguments: None,
)
