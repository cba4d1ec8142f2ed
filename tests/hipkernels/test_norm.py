from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import pipert.hipkernels as hk
from pipert.hipkernels.errors import KernelInputError
from pipert.hipkernels.runtime import Library, use
from tests.hipkernels.check import DTYPES, SIZES, assert_close, double, leaf, randn


def expected_norm(
    h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, centred: bool, eps: float = 1e-5
) -> torch.Tensor:
    if centred:
        return F.layer_norm(h, h.shape[-1:], weight, bias, eps)
    return F.rms_norm(h, h.shape[-1:], weight, eps)


@pytest.mark.parametrize("columns", SIZES)
@pytest.mark.parametrize("centred", [True, False], ids=["layer", "rms"])
def test_norm_and_its_gradients_equal_float64(library: Library, columns: int, centred: bool) -> None:
    for dtype in DTYPES if columns < 1000 or columns == 1024 else DTYPES[:1]:
        rows = 7 if columns < 1000 else 2
        x, weight, bias = (
            leaf(randn(*s, dtype=d)) for s, d in [((rows, columns), dtype)] + 2 * [((columns,), torch.float32)]
        )
        dy = randn(rows, columns, dtype=dtype, seed=5)
        y = hk.layer_norm(x, weight, bias) if centred else hk.rms_norm(x, weight)
        y.backward(dy)
        x64, weight64, bias64 = double(x), double(weight), double(bias)
        y64 = expected_norm(x64, weight64, bias64 if centred else None, centred)
        y64.backward(dy.double())
        # A row of one or two equal elements divides by sqrt(eps): errors grow by up to 1 / sqrt(1e-5) = 316.
        slack = 8.0 if columns > 3 else 400.0
        assert_close(y, y64, slack, "y")
        assert_close(x.grad, x64.grad, slack, "dx")
        assert_close(weight.grad, weight64.grad, slack * rows, "dweight")
        if centred:
            assert_close(bias.grad, bias64.grad, slack * rows, "dbias")


@pytest.mark.parametrize("rows", [1, 2, 31, 33, 65, 170])
def test_rows_are_shared_out_among_blocks_whatever_their_number(library: Library, rows: int) -> None:
    x, weight, bias = leaf(randn(rows, 12)), leaf(randn(12)), leaf(randn(12, seed=3))
    hk.layer_norm(x, weight, bias).backward(dy := randn(rows, 12, seed=8))
    x64, weight64, bias64 = double(x), double(weight), double(bias)
    expected_norm(x64, weight64, bias64, True).backward(dy.double())
    assert_close(x.grad, x64.grad, 8.0, "dx")
    assert_close(weight.grad, weight64.grad, rows, "dweight")
    assert_close(bias.grad, bias64.grad, rows, "dbias")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [40, 96])
@pytest.mark.parametrize("centred", [True, False], ids=["layer", "rms"])
def test_the_residual_is_added_and_takes_part_in_the_gradient(
    library: Library, dtype: torch.dtype, columns: int, centred: bool
) -> None:
    shape = (5, columns)
    x, residual, weight = (
        leaf(randn(*shape, dtype=dtype)),
        leaf(randn(*shape, dtype=dtype, seed=1)),
        leaf(randn(columns)),
    )
    y, h = (hk.add_layer_norm if centred else hk.add_rms_norm)(x, residual, weight)
    assert torch.equal(h, x + residual)
    dy, dh = randn(*shape, dtype=dtype, seed=2), randn(*shape, dtype=dtype, seed=3)
    torch.autograd.backward([y, h], [dy, dh])
    h64, weight64 = double(h), double(weight)
    y64 = expected_norm(h64, weight64, None, centred)
    torch.autograd.backward([y64, h64 * 1.0], [dy.double(), dh.double()])
    assert_close(y, y64, 8.0, "y")
    assert_close(x.grad, h64.grad, 8.0, "dx")
    assert torch.equal(x.grad, residual.grad)
    assert_close(weight.grad, weight64.grad, 8.0, "dweight")


def test_only_the_sum_or_only_the_norm_may_have_a_gradient(library: Library) -> None:
    x, residual = leaf(randn(4, 24)), leaf(randn(4, 24, seed=1))
    hk.add_rms_norm(x, residual)[1].sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 24))
    x.grad = None
    hk.add_rms_norm(x, residual)[0].sum().backward()
    h64 = double(x + residual)
    F.rms_norm(h64, (24,), eps=1e-5).sum().backward()
    assert_close(x.grad, h64.grad, 8.0)


def test_weights_of_another_dtype_than_the_input_keep_their_own(library: Library) -> None:
    for dtype, other in [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]:
        x, weight, bias = leaf(randn(3, 32, dtype=dtype)), leaf(randn(32, dtype=other)), leaf(randn(32, dtype=other))
        y = hk.layer_norm(x, weight, bias)
        y.sum().backward()
        assert (y.dtype, x.grad.dtype, weight.grad.dtype, bias.grad.dtype) == (dtype, dtype, other, other)
        assert_close(y, expected_norm(x.double(), weight.double(), bias.double(), True), 8.0)


def test_the_biass_gradient_is_rounded_to_its_own_dtype_alone(library: Library) -> None:
    for weight_dtype, dtype in [(torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)]:
        bias, dy = leaf(torch.zeros(32, dtype=dtype)), randn(9, 32)
        hk.layer_norm(randn(9, 32), leaf(torch.ones(32, dtype=weight_dtype)), bias).backward(dy)
        assert_close(bias.grad, dy.double().sum(0), 8.0 if dtype == torch.float32 else 0.01)


def test_expanded_and_transposed_gradients_and_inputs_are_right_and_left_alone(library: Library) -> None:
    base = randn(6, 5, 16)
    for view in (
        lambda t: t.transpose(0, 1),
        lambda t: t[::2],
        lambda t: t[..., ::2],
        lambda t: t[:, :1].expand(6, 5, 16),
    ):
        x, weight = leaf(base), leaf(randn(view(base).shape[-1]))
        y = hk.layer_norm(view(x), weight)
        for dy in (torch.ones(()).expand(y.shape), randn(*reversed(y.shape)).permute(2, 1, 0)):
            x.grad = weight.grad = None
            kept = dy.clone()
            y.backward(dy, retain_graph=True)
            x64, weight64 = double(base), double(weight)
            expected_norm(view(x64), weight64, None, True).backward(dy.double())
            assert_close(x.grad, x64.grad, 64.0)
            assert_close(weight.grad, weight64.grad, 64.0)
            assert torch.equal(dy, kept)
            assert torch.equal(x, base)


def test_rows_too_long_for_the_threads_of_a_block_are_right_as_well(library: Library) -> None:
    x, weight = leaf(randn(2, 20001)), leaf(randn(20001))
    hk.layer_norm(x, weight).sum().backward()
    x64, weight64 = double(x), double(weight)
    expected_norm(x64, weight64, None, True).sum().backward()
    assert_close(x.grad, x64.grad, 8.0)
    assert_close(weight.grad, weight64.grad, 8.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [33, 96])
def test_rows_with_infinities_or_nan_spoil_only_themselves(library: Library, dtype: torch.dtype, columns: int) -> None:
    x = randn(4, columns, dtype=dtype)
    x[1, 5], x[2, 7] = float("inf"), float("nan")
    y = hk.layer_norm(x)
    assert y[[0, 3]].isfinite().all()
    assert y[1].isnan().any()
    assert y[2].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [33, 96])
def test_results_that_are_subnormal_are_rounded_to_nearest(library: Library, dtype: torch.dtype, columns: int) -> None:
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    x, weight = randn(4, columns, dtype=dtype), torch.full((columns,), 40.0 * smallest)
    expected = F.rms_norm(x.double(), (columns,), weight.double(), 1e-5)
    assert (hk.rms_norm(x, weight).double() - expected).abs().max() <= 0.501 * smallest


@pytest.mark.parametrize(("place", "outlier"), [(0, 0.0), (0, 1e4), (5, 1e4), (0, -3e6)])
@pytest.mark.parametrize("mean", [0.0, 1e3, -1e5])
def test_rows_far_from_zero_and_outliers_cost_no_digits(
    library: Library, mean: float, place: int, outlier: float
) -> None:
    x = randn(6, 96) + mean
    x[:, place] += outlier
    expected = torch.nn.functional.layer_norm(x.double(), (96,))
    rounding = 1e-4 * max(1.0, abs(mean) / 1e3)  # a mean in fp32 is off by half its last digit, values by as much
    assert (hk.layer_norm(x).double() - expected).abs().max() < rounding


def test_no_rows_are_no_work_and_gradients_of_zero(library: Library) -> None:
    x, weight = leaf(torch.empty(0, 9)), leaf(torch.ones(9))
    hk.layer_norm(x, weight).sum().backward()
    assert x.grad.shape == (0, 9)
    assert torch.equal(weight.grad, torch.zeros(9))


def test_out_is_written_and_nothing_beside_it(library: Library) -> None:
    memory = torch.full((4, 10), 7.0)
    out = memory[1:3]
    assert hk.layer_norm(randn(2, 10), out=out) is out
    assert_close(out, F.layer_norm(randn(2, 10).double(), (10,)), 8.0)
    assert torch.equal(memory[[0, 3]], torch.full((2, 10), 7.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_do_not_depend_on_where_a_tensor_lies(host: Library, dtype: torch.dtype) -> None:
    x, weight = randn(3, 64, dtype=dtype), randn(64)
    beside = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(3, 64)  # at no multiple of 16 bytes
    with use(host):
        assert torch.equal(hk.layer_norm(x, weight), hk.layer_norm(beside, weight))


def test_gradients_are_those_of_finite_differences() -> None:
    x, residual, weight, bias = (leaf(randn(*s).double()) for s in [(3, 5), (3, 5), (5,), (5,)])
    assert torch.autograd.gradcheck(lambda *a: hk.add_layer_norm(*a), (x, residual, weight, bias))
    assert torch.autograd.gradcheck(lambda *a: hk.add_rms_norm(*a), (x, residual, weight))
    assert torch.autograd.gradcheck(lambda *a: hk.layer_norm(*a), (x, weight, bias))


def test_what_does_not_fit_is_refused() -> None:
    x = randn(3, 8)
    for call in (
        lambda: hk.layer_norm(x, randn(7)),
        lambda: hk.layer_norm(x, torch.ones(8, dtype=torch.int64)),
        lambda: hk.add_rms_norm(x, randn(3, 7)),
        lambda: hk.add_rms_norm(x, randn(3, 8, dtype=torch.bfloat16)),
        lambda: hk.layer_norm(torch.tensor(1.0)),
        lambda: hk.layer_norm(torch.empty(3, 0)),
        lambda: hk.layer_norm(x, out=torch.empty(8, 3).t()),
        lambda: hk.layer_norm(x.double(), out=torch.empty(2, 3, 8).double()),
        lambda: hk.layer_norm(x, randn(8).to("meta")),
    ):
        with pytest.raises(KernelInputError):
            call()


@pytest.mark.parametrize(("columns", "dtype"), [(257, torch.float32), (256, torch.float32), (256, torch.bfloat16)])
def test_results_do_not_depend_on_the_run_or_the_number_of_threads(
    host: Library, columns: int, dtype: torch.dtype
) -> None:
    x, dy = (randn(600, columns, dtype=dtype, seed=seed) for seed in (0, 2))
    weight, bias = randn(columns), randn(columns, seed=1)

    def run(threads: int) -> list[torch.Tensor]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            leaves = [leaf(x), leaf(weight), leaf(bias)]
            y = hk.layer_norm(*leaves)
            y.backward(dy)
            return [y.detach(), *(t.grad for t in leaves)]
        finally:
            torch.set_num_threads(before)

    with use(host):
        first = run(1)
        for again in (run(1), run(2), run(2)):
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
