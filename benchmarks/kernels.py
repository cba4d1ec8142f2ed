"""The fused kernels against torch eager, torch.compile (inductor) and torch's fused AdamW, and against copying memory.

    python benchmarks/kernels.py                    the CPU, one thread and two
    python benchmarks/kernels.py --small            only the smallest size of each part
    python benchmarks/kernels.py --part norm --dtype float32     one part in one dtype, without the bars on means
    python benchmarks/kernels.py --device cuda      an AMD or NVIDIA GPU

Contestants take turns and the median of the rounds counts. Memory is warm: freed memory stays with the process, for
everyone alike. What a case must move is compared with copying as many bytes in the same turns. At the end a GPT's
forward and backward run with the kernels and with torch's own functions. The last line is one JSON object; the exit
code is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from statistics import geometric_mean, median

# Fresh pages cost more than any kernel. Keep them, for all contestants: glibc reads these when the process starts.
WARM = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 36), "MALLOC_TOP_PAD_": str(1 << 26)}
if __name__ == "__main__" and any(os.environ.get(name) != value for name, value in WARM.items()):
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **WARM, "PIPERT_KERNELS": "required"})

import torch  # noqa: E402
from _kernel_cases import Case, activation_cases, dropout_cases, loss_cases, norm_cases, optimizer_cases  # noqa: E402
from _verdicts import Bar, conclude, verdicts  # noqa: E402

from pipert.models import GPT, CausalLMLoss, GPTConfig  # noqa: E402

BARS: tuple[Bar, ...] = (
    ("x eager", "at least", 1.0),
    ("x inductor", "at least", 1.0),
    ("x torch's fused AdamW", "at least", 1.0),
    ("x torch's fused AdamW and casts", "at least", 1.6),
    ("of copy bandwidth", "at least", 0.8),
    ("geometric mean: x eager", "at least", 1.7),
    ("geometric mean: x inductor", "at least", 1.7),
    ("x without kernels", "at least", 1.02),
)
SHAPES = [(2048, 768), (8192, 2048), (4096, 1024)]
#: What a GPU runs: so large that starting it takes less than running it.
GPU_SHAPES = [(8192, 2048), (16384, 4096), (4096, 1024)]
#: Runs of a contestant in a row on a GPU, which is asked for the time at their end only: they queue up.
GPU_RUNS = 10
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BLOCK = {"norm": norm_cases, "dropout": dropout_cases, "activation": activation_cases}
PARTS = (*BLOCK, "loss", "optimizer", "gpt")


def take_turns(contestants: dict[str, Callable[[], object]], rounds: int, device: str) -> dict[str, float]:
    """Median seconds of each, one run after another in every round; two rounds warm up.

    In every round the order is another, since each finds in the caches what the one before it has left.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    runs = GPU_RUNS if device == "cuda" else 1
    for number in range(rounds + 2):
        for name in Random(number).sample(list(contestants), len(contestants)):
            contestant = contestants[name]
            start = time.perf_counter()
            for _ in range(runs):
                contestant()
            if device == "cuda":
                torch.cuda.synchronize()
            if number >= 2:
                seconds[name].append((time.perf_counter() - start) / runs)
    return {name: median(values) for name, values in seconds.items()}


def measure(case: Case, rounds: int, device: str) -> dict[str, float]:
    """Ratios of one case: above 1, ours is faster."""
    source = torch.ones(max(case.moved // 8, 1), device=device)
    target = torch.empty_like(source)
    contestants: dict[str, Callable[[], object]] = {case.rival: case.eager}
    if case.inductor is not None:
        contestants["inductor"] = case.inductor
    seconds = take_turns({"ours": case.ours, **contestants, "copy": lambda: target.copy_(source)}, rounds, device)
    ratios = {f"x {name}": seconds[name] / seconds["ours"] for name in contestants}
    return {**ratios, "of copy bandwidth" if case.bounded else "of copying": seconds["copy"] / seconds["ours"]}


def cases(part: str, dtype: torch.dtype, small: bool, device: str) -> Iterator[Case]:
    """The cases of a part; `small` leaves out all sizes but the smallest."""
    gpu = device == "cuda"
    if part == "loss":
        yield from loss_cases(4096 if gpu else 1024, 50304, dtype, device)
    elif part == "optimizer":
        sizes = (40_000_000, 160_000_000) if gpu else (10_000_000, 40_000_000)
        for n in sizes[:1] if small else sizes:
            yield from optimizer_cases(n, dtype, device)
    else:
        shapes = GPU_SHAPES if gpu else SHAPES
        for shape in shapes[:1] if small else shapes:
            yield from BLOCK[part](*shape, dtype, device)


@contextmanager
def kernels(mode: str) -> Iterator[None]:
    """With ``PIPERT_KERNELS`` of this value, which is read at every call."""
    before = os.environ.get("PIPERT_KERNELS", "auto")
    os.environ["PIPERT_KERNELS"] = mode
    try:
        yield
    finally:
        os.environ["PIPERT_KERNELS"] = before


def gpt(dtype: torch.dtype, rounds: int, device: str) -> dict[str, float]:
    """A GPT's forward and backward with kernels, against the same without."""
    width, length = (1024, 1024) if device == "cuda" else (256, 256)
    config = GPTConfig(
        layers=4, hidden=width, heads=width // 64, sequence=length, vocabulary=8192, positions="rotary", dropout=0.0
    )
    model, loss = GPT(config, device=device, dtype=dtype), CausalLMLoss()
    ids = torch.randint(config.vocabulary, (4, config.sequence), device=device)

    def step(mode: str) -> None:
        with kernels(mode):
            model.zero_grad()
            loss(model(ids), ids).backward()

    modes = {"required": partial(step, "required"), "reference": partial(step, "reference")}
    seconds = take_turns(modes, rounds, device)
    return {"x without kernels": seconds["reference"] / seconds["required"]}


def report(name: str, row: dict[str, float]) -> dict[str, float]:
    """Print a row; its figures."""
    print(f"{name:52}" + "  ".join(f"{value:6.2f} {kind}" for kind, value in row.items()), flush=True)
    return {f"{name}: {kind}": value for kind, value in row.items()}


def measure_part(part: str, dtype: str, options: argparse.Namespace, threads: list[int]) -> dict[str, float]:
    """All figures of a part, printed as they come."""
    if part == "gpt":
        torch.set_num_threads(threads[-1])
        return report(f"GPT forward and backward {dtype}", gpt(DTYPES[dtype], options.rounds, options.device))
    figures: dict[str, float] = {}
    for case in cases(part, DTYPES[dtype], options.small, options.device):
        for count in threads:
            torch.set_num_threads(count)
            name = f"{case.name}, {count} threads" if options.device == "cpu" else case.name
            figures |= report(name, measure(case, options.rounds, options.device))
        del case
        gc.collect()
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--small", action="store_true", help="only the smallest sizes")
    parser.add_argument("--part", choices=PARTS, help="only this")
    parser.add_argument("--dtype", choices=list(DTYPES), help="only this")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device cuda, but torch {torch.__version__} sees no GPU")
    threads = sorted({1, min(2, os.cpu_count() or 1)}) if options.device == "cpu" else [torch.get_num_threads()]
    torch._inductor.config.cpp.dynamic_threads = True  # type: ignore[attr-defined]  # one build for all of them
    torch._dynamo.config.recompile_limit = 64
    figures: dict[str, float] = {}
    for part in PARTS if options.part is None else (options.part,):
        for dtype in DTYPES if options.dtype is None else (options.dtype,):
            figures |= measure_part(part, dtype, options, threads)
    if options.part is None and options.dtype is None:
        for rival in ("x eager", "x inductor"):
            mean = geometric_mean(value for name, value in figures.items() if name.endswith(rival))
            figures |= report("geometric mean", {rival: mean})
    bars = verdicts(figures, BARS)
    for name, verdict in bars.items():
        if not verdict["ok"]:
            print(f"missed: {name} is {figures[name]:.2f}, not {verdict['bar']}")
    return conclude("kernels", figures, bars)


if __name__ == "__main__":
    sys.exit(main())
