from __future__ import annotations

import pytest
import torch

import pipert.hipkernels as hk
from pipert.hipkernels.errors import KernelInputError
from pipert.hipkernels.runtime import Library
from tests.hipkernels.check import DTYPES, assert_close, double, leaf, randn


def tables(positions: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.outer(torch.arange(positions).double(), 100.0 ** -(torch.arange(half).double() / half))
    return angle.cos(), angle.sin()


def turned(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Positions in dimension -2, as complex multiplication."""
    half = cosines.shape[-1]
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.complex(cosines, sines)
    return torch.cat((pairs.real, pairs.imag, x[..., 2 * half :]), -1)


@pytest.mark.parametrize(
    ("half", "width"), [(1, 2), (1, 5), (3, 6), (4, 8), (8, 20), (16, 32), (32, 64), (33, 67), (64, 128)]
)
def test_rotation_and_its_gradient_equal_complex_multiplication(library: Library, half: int, width: int) -> None:
    cosines, sines = tables(9, half)
    for dtype in DTYPES:
        x, dy = leaf(randn(2, 3, 9, width, dtype=dtype)), randn(2, 3, 9, width, dtype=dtype, seed=1)
        y = hk.rotary(x, cosines, sines)
        y.backward(dy)
        x64 = double(x)
        y64 = turned(x64, cosines, sines)
        y64.backward(dy.double())
        assert_close(y, y64, 2.0)
        assert_close(x.grad, x64.grad, 2.0)


@pytest.mark.parametrize("positions", [1, 2, 31, 33, 129, 700])
def test_every_position_has_its_angle(library: Library, positions: int) -> None:
    cosines, sines = tables(positions, 4)
    x = randn(2, positions, 8)
    assert_close(hk.rotary(x, cosines, sines), turned(x.double(), cosines, sines), 2.0)


def test_the_inverse_turns_back(library: Library) -> None:
    cosines, sines = tables(9, 8)
    x = randn(2, 9, 16)
    assert_close(hk.rotary(hk.rotary(x, cosines, sines), cosines, sines, inverse=True), x.double(), 4.0)


def test_views_are_read_where_they_lie_and_keep_their_strides(library: Library) -> None:
    packed = leaf(randn(2, 9, 3, 4, 16))  # (samples, positions, q k v, heads, width)
    cosines, sines = tables(9, 8)
    query = packed[:, :, 0].transpose(1, 2)
    y = hk.rotary(query, cosines, sines)
    assert_close(y, turned(query.detach().double(), cosines, sines), 2.0)
    same = hk.rotary(packed[:, :, 0], cosines, sines, dim=1)
    assert torch.equal(same.transpose(1, 2), y)
    y.backward(torch.ones(()).expand(y.shape))
    assert (packed.grad[:, :, 1:] == 0).all()
    dense = randn(2, 4, 9, 16).transpose(1, 2)
    assert hk.rotary(dense, cosines, sines, dim=1).stride() == dense.stride()
    strided = randn(9, 32)[:, ::2]
    assert_close(hk.rotary(strided, cosines, sines), turned(strided.double(), cosines, sines), 2.0)


def test_gradients_are_those_of_finite_differences() -> None:
    cosines, sines = tables(3, 2)
    x = leaf(randn(2, 3, 5).double())
    assert torch.autograd.gradcheck(lambda a: hk.rotary(a, cosines, sines), (x,))


def test_what_does_not_fit_is_refused() -> None:
    cosines, sines = tables(4, 3)
    for call in (
        lambda: hk.rotary(randn(5, 6), cosines, sines),
        lambda: hk.rotary(randn(4, 5), cosines, sines),
        lambda: hk.rotary(randn(4, 6), cosines, sines[:, :2]),
        lambda: hk.rotary(randn(4, 6), cosines[0], sines),
        lambda: hk.rotary(randn(4, 6), cosines, sines, dim=-1),
        lambda: hk.rotary(randn(1, 1, 1, 4, 6), cosines, sines),
    ):
        with pytest.raises(KernelInputError):
            call()
