"""A product added to a sum in one pass has the bits of two, or is not added in one pass."""

from __future__ import annotations

import pytest
import torch

from pipert.engine import fused
from pipert.engine.fused import add_product

SHAPES = [(64, 96), (384, 384), (128, 1000), (1, 5000), (3, 7)]


def _matrix(rows: int, columns: int, dtype: torch.dtype, seed: int, *, start: int = 0) -> torch.Tensor:
    numbers = torch.randn(rows * columns + start, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return numbers[start:].view(rows, columns)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inner", [1, 33, 256, 3000])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sum_has_the_bits_of_a_product_that_is_rounded_then_added(
    shape: tuple[int, int], inner: int, dtype: torch.dtype
) -> None:
    for start in (0, 1):
        left = _matrix(inner, shape[0], dtype, 1, start=start).t()
        right = _matrix(inner, shape[1], dtype, 2)
        total = _matrix(*shape, dtype, 3, start=start)
        expected = total + left.mm(right)
        add_product(total, left, right)
        assert torch.equal(total, expected)


def test_a_library_that_rounds_otherwise_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def addmm(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        half = left.shape[1] // 2  # a block ends in the middle
        return total.add_(left[:, :half].mm(right[:half])).add_(left[:, half:].mm(right[half:]))

    fused._alike.cache_clear()
    monkeypatch.setattr(torch.Tensor, "addmm_", addmm)
    left, right, total = (_matrix(100, 100, torch.float32, seed) for seed in range(3))
    expected = total + left.mm(right)
    add_product(total, left, right)
    assert torch.equal(total, expected)
    fused._alike.cache_clear()


def test_a_trial_leaves_torchs_random_numbers_alone() -> None:
    fused._alike.cache_clear()
    left, right, total = (_matrix(100, 100, torch.float32, seed) for seed in range(3))
    before = torch.get_rng_state()
    add_product(total, left, right)
    assert fused._alike.cache_info().currsize == 1
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "right",
    [torch.ones(1, 1).expand(100, 100), torch.randn(200, 200)[::2, ::2], torch.randn(100, 100).conj()],
    ids=["expanded", "every second", "plain"],
)
def test_any_memory_layout_may_be_added(right: torch.Tensor) -> None:
    left, total = (_matrix(100, 100, torch.float32, seed) for seed in range(2))
    expected = total + left.mm(right)
    add_product(total, left, right)
    assert torch.equal(total, expected)
