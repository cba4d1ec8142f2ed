from __future__ import annotations

import pytest
import torch

import pipert.hipkernels as hk
from pipert.hipkernels.errors import KernelInputError
from pipert.hipkernels.runtime import Library
from tests.hipkernels.check import DTYPES, SIZES, assert_close, double, leaf, randn


def expected_softmax(x: torch.Tensor, out: torch.Tensor, scale: float) -> torch.Tensor:
    """Softmax by its definition, with rows of zeros where everything is out."""
    powers = (x * scale - (x * scale).amax(-1, keepdim=True).detach()).exp().masked_fill(out, 0.0)
    return powers / powers.sum(-1, keepdim=True).clamp(min=1e-300)


@pytest.mark.parametrize("columns", SIZES)
def test_masked_softmax_and_its_gradient_equal_float64(library: Library, columns: int) -> None:
    for dtype in DTYPES if columns < 1000 or columns == 1024 else DTYPES[:1]:
        x, dy = leaf(3 * randn(2, 3, 4, columns, dtype=dtype)), randn(2, 3, 4, columns, dtype=dtype, seed=1)
        mask = randn(2, 1, 4, columns, seed=2) > -0.5
        mask[0, 0, 1] = False
        y = hk.masked_softmax(x, mask, scale=0.7)
        y.backward(dy)
        x64 = double(x)
        y64 = expected_softmax(x64, ~mask, 0.7)
        y64.backward(dy.double())
        assert_close(y, y64, 1.0, "y")
        assert_close(x.grad, x64.grad, 2.0, "dx")  # of the rounded y
        assert (y[0, :, 1] == 0).all()
        assert (x.grad[0, :, 1] == 0).all()


@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (16, 16), (33, 33), (4, 64), (64, 4), (3, 129)])
def test_causal_queries_see_the_past_only(library: Library, shape: tuple[int, int]) -> None:
    queries, columns = shape
    for dtype in (torch.float32, torch.bfloat16):
        x, dy = leaf(randn(2, *shape, dtype=dtype)), randn(2, *shape, dtype=dtype, seed=3)
        y = hk.masked_softmax(x, causal=True)
        y.backward(dy)
        out = torch.ones(shape, dtype=torch.bool).triu(columns - queries + 1)
        x64 = double(x)
        y64 = expected_softmax(x64, out, 1.0)
        y64.backward(dy.double())
        assert_close(y, y64)
        assert_close(x.grad, x64.grad, 2.0)
        assert (y[:, out] == 0).all()
        assert (x.grad[:, out] == 0).all()


def test_masks_broadcast_in_every_way_and_go_with_causal(library: Library) -> None:
    x = randn(2, 3, 8, 8)
    for shape in [(2, 3, 8, 8), (1, 1, 1, 8), (8,), (8, 8), (2, 1, 8, 1), (3, 1, 8), (1, 3, 8, 1)]:
        mask = randn(*shape, seed=len(shape)) > -0.3
        out = ~mask | torch.ones(8, 8, dtype=torch.bool).triu(1)
        assert_close(hk.masked_softmax(x, mask, causal=True), expected_softmax(x.double(), out, 1.0))


def test_unusual_scores_do_as_torch_does(library: Library) -> None:
    x = randn(6, 40)
    x[0] += 1e4
    x[1] = -torch.inf
    x[1, 3] = 1.0
    x[2, 5] = torch.nan
    x[3] = torch.nan
    x[4] *= 1e4
    y = hk.masked_softmax(x)
    torch.testing.assert_close(y, x.double().softmax(-1).float(), equal_nan=True, rtol=1e-5, atol=1e-6)
    assert torch.equal(hk.masked_softmax(torch.full((2, 5), -torch.inf)), torch.zeros(2, 5))


def test_out_may_be_the_scores_and_views_are_right(library: Library) -> None:
    x = randn(6, 4, 10)
    expected = x.transpose(0, 1).double().softmax(-1)
    leaf_x = leaf(x)
    y = hk.masked_softmax(leaf_x.transpose(0, 1))
    assert_close(y, expected)
    y.backward(torch.ones(()).expand(y.shape))
    assert leaf_x.grad.abs().max() < 1e-6
    assert hk.masked_softmax(x, out=x) is x
    assert_close(x.transpose(0, 1), expected)


def test_gradients_are_those_of_finite_differences() -> None:
    x = leaf(randn(2, 3, 4).double())
    mask = torch.tensor([True, True, False, True])
    assert torch.autograd.gradcheck(lambda a: hk.masked_softmax(a, mask, scale=0.5, causal=True), (x,))


def test_what_does_not_fit_is_refused() -> None:
    x = randn(2, 3, 4)
    for call in (
        lambda: hk.masked_softmax(x, torch.ones(3, 3, dtype=torch.bool)),
        lambda: hk.masked_softmax(x, torch.ones(4)),
        lambda: hk.masked_softmax(randn(4)),
        lambda: hk.masked_softmax(randn(1, 1, 1, 2, 4)),
        lambda: hk.masked_softmax(x, torch.ones(1, 2, 3, 4, dtype=torch.bool)),
    ):
        with pytest.raises(KernelInputError):
            call()
