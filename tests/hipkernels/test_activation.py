from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import pipert.hipkernels as hk
from pipert.hipkernels.errors import KernelInputError
from pipert.hipkernels.runtime import Library, use
from tests.hipkernels.check import DTYPES, SIZES, assert_close, double, leaf, randn


@pytest.mark.parametrize("columns", SIZES)
def test_gelu_of_a_biased_input_and_its_gradients_equal_float64(library: Library, columns: int) -> None:
    for approximate in ("none", "tanh"):
        for dtype in DTYPES if columns < 1000 or columns == 1024 else DTYPES[:1]:
            x, bias = leaf(3 * randn(5, columns, dtype=dtype)), leaf(randn(columns))
            dy = randn(5, columns, dtype=dtype, seed=1)
            y = hk.bias_gelu(x, bias, approximate=approximate)
            y.backward(dy)
            x64, bias64 = double(x), double(bias)
            y64 = F.gelu(x64 + bias64, approximate=approximate)
            y64.backward(dy.double())
            assert_close(y, y64, 0.1, "y")
            assert_close(x.grad, x64.grad, 1.0, "dx")
            assert_close(bias.grad, bias64.grad, 8.0, "dbias")


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_without_bias_is_right_from_the_far_left_to_the_far_right(library: Library, approximate: str) -> None:
    x = leaf(torch.cat((torch.linspace(-30, 30, 4001), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 100.0, -100.0]))))
    y = hk.bias_gelu(x, approximate=approximate)
    y.sum().backward()
    x64 = double(x)
    y64 = F.gelu(x64, approximate=approximate)
    y64.sum().backward()
    # Relative where the result is not tiny: the tail is fitted, not a difference of nearly equal numbers.
    assert ((y - y64).abs() <= 3e-6 * y64.abs() + 1e-9).all()
    assert_close(x.grad, x64.grad, 1.0)


@pytest.mark.parametrize("columns", SIZES)
def test_swiglu_and_its_gradient_equal_float64(library: Library, columns: int) -> None:
    for dtype in DTYPES if columns < 1000 or columns == 1024 else DTYPES[:1]:
        x, dy = leaf(3 * randn(5, 2 * columns, dtype=dtype)), randn(5, columns, dtype=dtype, seed=1)
        y = hk.swiglu(x)
        y.backward(dy)
        x64 = double(x)
        gate, up = x64.chunk(2, -1)
        y64 = F.silu(gate) * up
        y64.backward(dy.double())
        assert_close(y, y64, 1.0, "y")
        assert_close(x.grad, x64.grad, 4.0, "dx")


def test_large_arguments_neither_overflow_nor_make_nan(library: Library) -> None:
    x = leaf(torch.tensor([[-1e4, -200.0, 200.0, 1e4, 1.0, 1.0, 1.0, 1.0]]))
    y = hk.swiglu(x)
    y.sum().backward()
    assert torch.equal(y, torch.tensor([[0.0, 0.0, 200.0, 1e4]]) + y * 0)
    assert x.grad.isfinite().all()
    for approximate in ("none", "tanh"):
        assert torch.equal(
            hk.bias_gelu(x.detach(), approximate=approximate)[0, :4].abs(), torch.tensor([0.0, 0, 200, 1e4])
        )


def test_gradients_as_expanded_and_transposed_views_and_mixed_dtypes_are_right(library: Library) -> None:
    x, bias = leaf(randn(6, 4, 16, dtype=torch.bfloat16)), leaf(randn(16))
    for dy in (
        torch.ones((), dtype=torch.bfloat16).expand(4, 6, 16),
        randn(16, 6, 4, dtype=torch.bfloat16).permute(2, 1, 0),
    ):
        x.grad = bias.grad = None
        hk.bias_gelu(x.transpose(0, 1), bias).backward(dy)
        x64, bias64 = double(x), double(bias)
        F.gelu(x64.transpose(0, 1) + bias64).backward(dy.double())
        assert_close(x.grad, x64.grad, 1.0)
        assert bias.grad.dtype == torch.float32
        assert_close(bias.grad, bias64.grad, 24.0 * 2000)  # bf16 gradients of 24 rows were rounded by autograd
    y = hk.swiglu(leaf(randn(6, 16)).t()[:4])
    y.sum().backward()


def test_rows_too_long_for_a_block_still_get_their_bias_gradient(library: Library) -> None:
    x, bias = leaf(randn(2, 16400)), leaf(randn(16400))
    hk.bias_gelu(x, bias).sum().backward()
    assert_close(bias.grad, x.grad.double().sum(0), 4.0)


def test_out_is_used_and_checked(library: Library) -> None:
    x = randn(3, 8)
    out = torch.empty(3, 4)
    assert hk.swiglu(x, out=out) is out
    assert torch.equal(out, hk.swiglu(x))
    assert hk.bias_gelu(x, out=x) is x
    with pytest.raises(KernelInputError, match="alike"):
        hk.swiglu(x, out=torch.empty(4, 3))


def test_gradients_are_those_of_finite_differences() -> None:
    x, bias = leaf(randn(3, 6).double()), leaf(randn(6).double())
    for approximate in ("none", "tanh"):
        assert torch.autograd.gradcheck(lambda a, b, how=approximate: hk.bias_gelu(a, b, approximate=how), (x, bias))
        assert torch.autograd.gradcheck(lambda a, how=approximate: hk.bias_gelu(a, approximate=how), (x,))
    assert torch.autograd.gradcheck(hk.swiglu, (x,))


def test_what_does_not_fit_is_refused() -> None:
    for call in (
        lambda: hk.swiglu(randn(3, 5)),
        lambda: hk.bias_gelu(randn(3, 5), randn(4)),
        lambda: hk.bias_gelu(randn(3, 5), approximate="sigmoid"),
    ):
        with pytest.raises(KernelInputError):
            call()


def test_bias_gradients_do_not_depend_on_the_number_of_threads(host: Library) -> None:
    def run(threads: int) -> torch.Tensor:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            bias = leaf(randn(33))
            hk.bias_gelu(randn(500, 33), bias).backward(randn(500, 33, seed=4))
            return bias.grad
        finally:
            torch.set_num_threads(before)

    with use(host):
        assert torch.equal(run(1), run(2))
