"""The fused kernels against torch eager, torch.compile and torch's fused AdamW, and against copying memory.

    python benchmarks/kernels.py                    the CPU, one thread and two
    python benchmarks/kernels.py --device cuda      an AMD or NVIDIA GPU
    python benchmarks/kernels.py --quick            small sizes and no limits, to see that it runs

Contestants take turns (interleaved) and the median of the rounds counts. Memory is warm: freed memory stays with the
process, for everyone alike. What a case must move is counted once for each tensor it reads or writes, and compared with
copying as many bytes in the same run. The last line is one JSON object; the exit code is 1 if a promise is not kept.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import geometric_mean, median

# Fresh pages cost more than any kernel. Keep them, for all contestants: glibc reads these when the process starts.
WARM = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 36), "MALLOC_TOP_PAD_": str(1 << 26)}
if __name__ == "__main__" and any(os.environ.get(name) != value for name, value in WARM.items()):
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **WARM, "PIPERT_KERNELS": "required"})

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import pipert.hipkernels as hk  # noqa: E402

#: What is promised: least ratios, and least fraction of copy bandwidth.
LEAST, MEAN, ADAMW, BANDWIDTH = 1.0, 1.7, 1.6, 0.8


@dataclass(frozen=True)
class Case:
    """One operation at one size.

    Attributes:
        name: operation and direction.
        ours: the kernels.
        eager: torch.
        moved: bytes that have to be read and written.
        compile: whether torch.compile of ``eager`` takes part.
        limited: whether it must reach the fraction of copy bandwidth.
        least: least ratio to eager.
    """

    name: str
    ours: Callable[[], object]
    eager: Callable[[], object]
    moved: int
    compile: bool = True
    limited: bool = False
    least: float = LEAST


Op = Callable[..., torch.Tensor]


def training(
    function: Callable[..., torch.Tensor], leaves: list[torch.Tensor], dy: torch.Tensor
) -> Callable[[], object]:
    """Forward and backward of the leaves that need it."""
    wanted = [leaf for leaf in leaves if leaf.requires_grad]

    def run() -> object:
        return torch.autograd.grad(function(*leaves), wanted, dy)

    return run


def block_cases(tokens: int, hidden: int, dtype: torch.dtype, device: str) -> list[Case]:
    """What a GPT block does with its activations, forward and backward together."""

    def leaf(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(kind).requires_grad_()

    size = torch.empty((), dtype=dtype).element_size()
    x, residual, weight, bias = leaf(tokens, hidden), leaf(tokens, hidden), leaf(hidden), leaf(hidden)
    wide, wide_bias, pair = leaf(tokens, 4 * hidden), leaf(4 * hidden), leaf(tokens, 4 * hidden)
    n, label = tokens * hidden * size, f"{tokens}x{hidden} {str(dtype).removeprefix('torch.')}"
    keys = torch.arange(4, device=device)
    out = torch.empty_like(x, requires_grad=False)
    still = x.detach()

    def dropped(a: torch.Tensor, b: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return r + F.dropout(a + b, 0.1)

    def silu(a: torch.Tensor) -> torch.Tensor:
        gate, up = a.chunk(2, -1)
        return F.silu(gate) * up

    def summed(a: torch.Tensor, r: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(a + r, (hidden,), w, b)

    dy, wide_dy = torch.randn_like(x), torch.randn_like(wide)
    half_dy = torch.randn(tokens, 2 * hidden, device=device).to(dtype)
    fast_gelu = lambda a, b: hk.bias_gelu(a, b, approximate="tanh")  # noqa: E731
    slow_gelu = lambda a, b: F.gelu(a + b, approximate="tanh")  # noqa: E731
    fast_drop = lambda a, b, r: hk.bias_dropout_add(  # noqa: E731
        a.view(4, -1, hidden), b, r.view(4, -1, hidden), p=0.1, keys=keys
    ).view(tokens, hidden)
    norms, drops = [x, residual, weight, bias], [x, bias, residual]

    def both(name: str, fast: Op, slow: Op, leaves: list[torch.Tensor], dy: torch.Tensor, moved: int) -> Case:
        return Case(f"{name} {label}", training(fast, leaves, dy), training(slow, leaves, dy), moved)

    return [
        Case(
            f"LayerNorm forward {label}",
            lambda: hk.layer_norm(still, weight, bias, out=out),
            lambda: F.layer_norm(still, (hidden,), weight.detach(), bias.detach()),
            2 * n,
            limited=True,
        ),
        both("add + LayerNorm", lambda *a: hk.add_layer_norm(*a)[0], summed, norms, dy, 7 * n),
        both("bias + GELU", fast_gelu, slow_gelu, [wide, wide_bias], wide_dy, 20 * n),
        both("SwiGLU", hk.swiglu, silu, [pair], half_dy, 16 * n),
        both("bias + dropout + residual", fast_drop, dropped, drops, dy, 5 * n),
    ]


def loss_cases(tokens: int, vocabulary: int, dtype: torch.dtype, device: str) -> list[Case]:
    """Cross-entropy, forward and backward."""
    logits = torch.randn(tokens, vocabulary, device=device).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=device)
    dy = torch.ones(tokens, device=device)
    moved = 3 * logits.numel() * logits.element_size()
    ours = training(lambda a: hk.cross_entropy(a, targets), [logits], dy)
    eager = training(lambda a: F.cross_entropy(a.float(), targets, reduction="none"), [logits], dy)
    return [Case(f"cross-entropy {tokens}x{vocabulary} {str(dtype).removeprefix('torch.')}", ours, eager, moved)]


def optimizer_cases(n: int, dtype: torch.dtype, device: str) -> list[Case]:
    """AdamW with fp32 masters and the casts to and from the model's dtype."""
    param, grad = torch.zeros(n, dtype=dtype, device=device), torch.randn(n, device=device).to(dtype)
    master, average, square = (torch.zeros(n, device=device) for _ in range(3))
    theirs = torch.nn.Parameter(torch.zeros(n, device=device))
    theirs.grad = torch.zeros(n, device=device)
    optimizer = torch.optim.AdamW([theirs], lr=1e-3, fused=True)

    def eager() -> None:
        theirs.grad.copy_(grad)
        optimizer.step()
        param.copy_(theirs.detach())

    def ours() -> None:
        hk.adamw_(param, master, average, square, grad, step=5, lr=1e-3, weight_decay=0.01)

    name = f"AdamW with casts {n / 1e6:.0f}M {str(dtype).removeprefix('torch.')}"
    return [Case(name, ours, eager, n * (6 * 4 + 2 * param.element_size()), compile=False, limited=True, least=ADAMW)]


def take_turns(contestants: dict[str, Callable[[], object]], rounds: int, device: str) -> dict[str, float]:
    """Median seconds of each, one run after another in every round."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 2):  # two to warm up
        for name, contestant in contestants.items():
            start = time.perf_counter()
            contestant()
            if device == "cuda":
                torch.cuda.synchronize()
            if number >= 2:
                seconds[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in seconds.items()}


def measure(case: Case, rounds: int, device: str, compiling: bool) -> dict[str, float]:
    """Ratios of one case: above 1, ours is faster."""
    source = torch.ones(max(case.moved // 8, 1), device=device)
    target = torch.empty_like(source)
    contestants: dict[str, Callable[[], object]] = {"ours": case.ours, "eager": case.eager}
    if compiling and case.compile:
        torch._dynamo.reset()
        contestants["compiled"] = _compiled(case)
    contestants["copy"] = lambda: target.copy_(source)
    seconds = take_turns(contestants, rounds, device)
    gc.collect()
    row = {"ms": seconds["ours"] * 1e3, "eager": seconds["eager"] / seconds["ours"]}
    if "compiled" in seconds:
        row["compiled"] = seconds["compiled"] / seconds["ours"]
    row["bandwidth"] = seconds["copy"] / seconds["ours"]
    return row


def _compiled(case: Case) -> Callable[[], object]:
    """The eager contestant with its forward function compiled by inductor (and with it the backward pass)."""
    cells = dict(zip(case.eager.__code__.co_freevars, case.eager.__closure__ or (), strict=True))
    if "function" not in cells:  # forward only
        return torch.compile(case.eager)
    function, leaves, wanted, dy = (cells[name].cell_contents for name in ("function", "leaves", "wanted", "dy"))
    compiled = torch.compile(function)
    return lambda: torch.autograd.grad(compiled(*leaves), wanted, dy)


def broken_promises(rows: dict[str, dict[str, float]], cases: dict[str, Case]) -> list[str]:
    """Which promises the rows break, in words."""
    broken = []
    for name, row in rows.items():
        case = cases[name.partition(" | ")[0]]
        if row["eager"] < case.least:
            broken.append(f"{name}: {row['eager']:.2f} x eager, promised {case.least}")
        if row.get("compiled", math.inf) < LEAST:
            broken.append(f"{name}: {row['compiled']:.2f} x torch.compile, promised {LEAST}")
        if case.limited and row["bandwidth"] < BANDWIDTH:
            broken.append(f"{name}: {row['bandwidth']:.2f} of copy bandwidth, promised {BANDWIDTH}")
    for column in ("eager", "compiled"):
        values = [row[column] for row in rows.values() if column in row]
        if values and geometric_mean(values) < MEAN:
            broken.append(f"geometric mean {geometric_mean(values):.2f} x {column}, promised {MEAN}")
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    options = parser.parse_args()
    shapes = [(64, 64)] if options.quick else [(2048, 768), (4096, 1024), (8192, 2048)]
    dtypes = [torch.float32, torch.bfloat16]
    threads = [1, min(2, os.cpu_count() or 1)] if options.device == "cpu" else [torch.get_num_threads()]
    losses = (64, 61) if options.quick else (1024, 50304)
    sizes = [1 << 16] if options.quick else [10_000_000, 40_000_000]
    makers: list[Callable[[], list[Case]]] = []
    for dtype in dtypes:
        makers += [partial(block_cases, *shape, dtype, options.device) for shape in shapes]
        makers += [partial(loss_cases, *losses, dtype, options.device)]
        makers += [partial(optimizer_cases, n, dtype, options.device) for n in sizes]
    rows: dict[str, dict[str, float]] = {}
    cases: dict[str, Case] = {}
    for make in makers:
        for case in make():
            cases[case.name] = case
            for count in dict.fromkeys(threads):
                torch.set_num_threads(count)
                row = measure(case, options.rounds, options.device, not options.no_compile)
                rows[f"{case.name} | {count} threads"] = row
        # The promises are still needed, the tensors are not.
        cases = {name: replace(case, ours=int, eager=int) for name, case in cases.items()}
    return report(rows, [] if options.quick else broken_promises(rows, cases))


def report(rows: dict[str, dict[str, float]], broken: list[str]) -> int:
    """Print the table, the broken promises and the JSON line; the exit code."""
    console = Console(width=130)
    columns = ("ms", "eager", "compiled", "bandwidth")
    table = Table("case", "ms", "x eager", "x compiled", "of copy", title="kernels")
    for name, row in rows.items():
        table.add_row(name, *(f"{row[column]:.2f}" if column in row else "-" for column in columns))
    console.print(table)
    for line in broken:
        console.print(f"[red]{line}[/red]")
    means = {
        column: geometric_mean(values)
        for column in ("eager", "compiled")
        if (values := [row[column] for row in rows.values() if column in row])
    }
    print(json.dumps({"rows": rows, "geometric means": means, "broken": broken}))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
