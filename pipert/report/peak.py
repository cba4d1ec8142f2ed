"""The operations a second that this machine's matrix product reaches: what utilisation is a share of."""

from __future__ import annotations

import time

import torch


def measured_peak(
    seconds: float = 0.3,
    *,
    size: int = 1024,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> float:
    """Floating-point operations a second of ``size × size`` matrix products, with the threads that torch has now.

    Ranks that share cores must all measure at once, as they will compute; the machine's peak is the sum.

    Args:
        seconds: how long to measure, after one product to warm up.
        size: rows and columns.
        device: where.
        dtype: of the matrices.
    """
    left, right, out = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(3))
    torch.mm(left, right, out=out)
    _finish(out)
    products, begin, elapsed = 0, time.perf_counter(), 0.0
    while elapsed < seconds:
        torch.mm(left, right, out=out)
        _finish(out)
        products += 1
        elapsed = time.perf_counter() - begin
    return 2.0 * size**3 * products / elapsed


def _finish(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
