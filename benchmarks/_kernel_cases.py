"""What a GPT's step does beside its matrix products: each operation by the kernels and by torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional as F

import pipert.hipkernels as hk

Function = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One operation at one size.

    Attributes:
        name: operation, size and dtype.
        ours: the kernels.
        eager: torch.
        inductor: torch.compile of the same; None: does not take part.
        moved: bytes that have to be read and written, each tensor once.
        rival: what the ratio to ``eager`` is called.
        bounded: whether it shall reach a fraction of copy bandwidth.
    """

    name: str
    ours: Callable[[], object]
    eager: Callable[[], object]
    inductor: Callable[[], object] | None
    moved: int
    rival: str = "eager"
    bounded: bool = False


def training(function: Function, leaves: list[torch.Tensor], dy: torch.Tensor) -> Callable[[], object]:
    """Forward and backward."""
    return lambda: torch.autograd.grad(function(*leaves), leaves, dy)


def both(name: str, ours: Function, torchs: Function, leaves: list[torch.Tensor], dy: torch.Tensor, moved: int) -> Case:
    """A case of forward and backward."""
    rivals = (training(f, leaves, dy) for f in (ours, torchs, torch.compile(torchs, dynamic=False)))
    return Case(name, *rivals, moved)


def leaf(dtype: torch.dtype, device: str, *shape: int) -> torch.Tensor:
    """Random numbers that get a gradient."""
    return torch.randn(*shape, device=device).to(dtype).requires_grad_()


def label_of(tokens: int, hidden: int, dtype: torch.dtype) -> str:
    """Size and dtype."""
    return f"{tokens}x{hidden} {str(dtype).removeprefix('torch.')}"


def norm_cases(tokens: int, hidden: int, dtype: torch.dtype, device: str) -> Iterator[Case]:
    """LayerNorm alone, and with the addition before it."""
    label, moved = label_of(tokens, hidden, dtype), tokens * hidden * dtype.itemsize
    x, residual = (leaf(dtype, device, tokens, hidden) for _ in range(2))
    weight, bias = (leaf(dtype, device, hidden) for _ in range(2))
    yield norm_case(x, weight, bias, label)
    yield both(
        f"add, LayerNorm {label}",
        lambda a, r, w, b: hk.add_layer_norm(a, r, w, b)[0],
        lambda a, r, w, b: F.layer_norm(a + r, (hidden,), w, b),
        [x, residual, weight, bias],
        torch.randn_like(x),
        7 * moved,
    )


def dropout_cases(tokens: int, hidden: int, dtype: torch.dtype, device: str) -> Iterator[Case]:
    """Dropout and the addition behind it."""
    label, moved = label_of(tokens, hidden, dtype), tokens * hidden * dtype.itemsize
    x, residual = (leaf(dtype, device, tokens, hidden) for _ in range(2))
    keys = torch.arange(4, device=device)
    yield both(
        f"dropout, add {label}",
        lambda a, r: hk.bias_dropout_add(a.view(4, -1), None, r.view(4, -1), p=0.1, keys=keys).view_as(a),
        lambda a, r: r + F.dropout(a, 0.1),
        [x, residual],
        torch.randn_like(x),
        5 * moved,
    )


def activation_cases(tokens: int, hidden: int, dtype: torch.dtype, device: str) -> Iterator[Case]:
    """What stands in an MLP, which is four times as wide."""
    label, moved = label_of(tokens, hidden, dtype), tokens * 4 * hidden * dtype.itemsize
    wide, pair = (leaf(dtype, device, tokens, 4 * hidden) for _ in range(2))
    wide_bias = leaf(dtype, device, 4 * hidden)
    yield both(
        f"bias, GELU {label}",
        lambda a, b: hk.bias_gelu(a, b, approximate="tanh"),
        lambda a, b: F.gelu(a + b, approximate="tanh"),
        [wide, wide_bias],
        torch.randn_like(wide),
        5 * moved,
    )
    yield both(
        f"SwiGLU {label}",
        hk.swiglu,
        lambda a: F.silu(a.chunk(2, -1)[0]) * a.chunk(2, -1)[1],
        [pair],
        torch.randn(tokens, 2 * hidden, device=device).to(dtype),
        4 * moved,
    )


def norm_case(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, label: str) -> Case:
    """LayerNorm forward, as in evaluation; results of all contestants come from the same allocator."""
    x, weight, bias = x.detach(), weight.detach(), bias.detach()
    moved = 2 * x.numel() * x.itemsize

    def torchs(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], weight, bias)

    compiled = torch.compile(torchs, dynamic=False)
    return Case(
        f"LayerNorm forward {label}",
        lambda: hk.layer_norm(x, weight, bias),
        lambda: torchs(x, weight, bias),
        lambda: compiled(x, weight, bias),
        moved,
        bounded=True,
    )


def loss_cases(tokens: int, vocabulary: int, dtype: torch.dtype, device: str) -> Iterator[Case]:
    """Cross-entropy."""
    logits = torch.randn(tokens, vocabulary, device=device).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=device)
    yield both(
        f"cross-entropy {tokens}x{vocabulary} {str(dtype).removeprefix('torch.')}",
        lambda a: hk.cross_entropy(a, targets),
        lambda a: F.cross_entropy(a.float(), targets, reduction="none"),
        [logits],
        torch.ones(tokens, device=device),
        3 * logits.numel() * logits.itemsize,
    )


def optimizer_cases(n: int, dtype: torch.dtype, device: str) -> Iterator[Case]:
    """AdamW; for bf16 parameters with fp32 masters, and the casts from and to bf16 that torch's needs around it."""
    casts = dtype != torch.float32
    param, grad = torch.zeros(n, dtype=dtype, device=device), torch.randn(n, device=device).to(dtype)
    master, average, square = (torch.zeros(n, device=device) for _ in range(3))
    theirs = torch.nn.Parameter(torch.zeros(n, device=device))
    theirs.grad = torch.zeros(n, device=device) if casts else grad
    optimizer = torch.optim.AdamW([theirs], lr=1e-3, fused=True)

    def eager() -> None:
        if casts:
            assert theirs.grad is not None
            theirs.grad.copy_(grad)
        optimizer.step()
        if casts:
            param.copy_(theirs.detach())

    def ours() -> None:
        hk.adamw_(param if casts else None, master, average, square, grad, step=5, lr=1e-3, weight_decay=0.01)

    name = f"AdamW {'with' if casts else 'without'} casts {n / 1e6:.0f}M {str(dtype).removeprefix('torch.')}"
    moved = n * (6 * 4 + (2 if casts else 1) * param.itemsize)
    rival = "torch's fused AdamW and casts" if casts else "torch's fused AdamW"
    yield Case(name, ours, eager, None, moved, rival, bounded=True)
