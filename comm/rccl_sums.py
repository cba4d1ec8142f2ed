"""What RCCL adds up itself, and what is widened for it: floats narrower than fp32 are rounded once, at the end."""

from __future__ import annotations

import torch

from pipert.comm.reduction import accumulation_dtype

#: The dtypes that the library sums itself.
SUMMED = {
    torch.float32: "ncclFloat32",
    torch.float64: "ncclFloat64",
    torch.int8: "ncclInt8",
    torch.uint8: "ncclUint8",
    torch.int32: "ncclInt32",
    torch.int64: "ncclInt64",
}


def summable(flat: torch.Tensor) -> torch.Tensor:
    """The same memory as a dtype that the library sums, or a copy in a wider one."""
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    if flat.dtype in SUMMED:
        return flat
    return flat.to(accumulation_dtype(flat.dtype) if flat.is_floating_point() else torch.int32)
