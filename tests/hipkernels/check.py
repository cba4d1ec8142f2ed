"""How results are compared: with float64, by a tolerance that is stated once."""

from __future__ import annotations

import torch

#: The sizes that kernels get wrong: around vectors, waves, blocks and powers of two.
SIZES = (1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 1000, 1024, 2049, 4097)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Rounding of a result to its dtype (half a unit in the last place, relative), with a factor for fp32's own sums.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal numbers of this shape, the same for one seed, on torch's default device."""
    generator = torch.Generator("cpu").manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, device="cpu").to(torch.get_default_device(), dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, slack: float = 1.0, name: str = "") -> None:
    """``|actual - expected| <= rounding * (|expected| + slack)``, elementwise, NaN and infinities equal.

    ``slack`` is the size of the numbers whose difference or sum the result is.
    """
    assert actual.shape == expected.shape, (name, actual.shape, expected.shape)
    rounding = ROUNDING[actual.dtype]
    torch.testing.assert_close(
        actual.double(),
        expected.double(),
        rtol=rounding,
        atol=rounding * slack,
        equal_nan=True,
        msg=lambda text: f"{name}: {text}",
    )


def double(tensor: torch.Tensor) -> torch.Tensor:
    """A float64 leaf with these values."""
    return tensor.detach().double().requires_grad_()


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf with these values."""
    return tensor.detach().clone().requires_grad_()
