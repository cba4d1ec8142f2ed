from __future__ import annotations

import pytest
import torch

import pipert.hipkernels as hk
from pipert.hipkernels.errors import KernelInputError
from pipert.hipkernels.runtime import Library
from tests.hipkernels.check import DTYPES, SIZES, assert_close, randn

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("size", [1, 7, 1025])
def test_fifty_steps_of_adamw_equal_torch(library: Library, size: int) -> None:
    ours = randn(size)
    theirs = torch.nn.Parameter(ours.clone())
    average, square = torch.zeros(size), torch.zeros(size)
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.999), weight_decay=0.1)
    betas, lr = (0.9, 0.999), 1e-2
    for step in range(1, 51):
        if step == 20:
            betas, lr = (0.8, 0.99), 3e-3
            optimizer.param_groups[0].update(betas=betas, lr=lr)
        theirs.grad = randn(size, seed=step)
        optimizer.step()
        hk.adamw_(None, ours, average, square, theirs.grad, step=step, lr=lr, betas=betas, weight_decay=0.1)
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(square, optimizer.state[theirs]["exp_avg_sq"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("param_dtype", DTYPES)
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_adamw_keeps_fp32_masters_and_rounds_the_weights_from_them(
    library: Library, param_dtype: torch.dtype, grad_dtype: torch.dtype
) -> None:
    for size in (16, 33, 1024):
        master, average, square = randn(size), randn(size, seed=1), randn(size, seed=2).abs()
        grad, param = randn(size, dtype=grad_dtype, seed=3), torch.zeros(size, dtype=param_dtype)
        kept = grad.clone()
        m = average.double() * 0.9 + 0.1 * grad.double() * 0.25
        v = square.double() * 0.95 + 0.05 * (grad.double() * 0.25) ** 2
        w = master.double() * (1 - 0.1 * 0.01) - 0.1 / (1 - 0.9**3) * m / (v.sqrt() / (1 - 0.95**3) ** 0.5 + 1e-6)
        hk.adamw_(
            param, master, average, square, grad, step=3, lr=0.1, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.01,
            scale=torch.tensor(0.25), skip=torch.tensor(0.0),
        )  # fmt: skip
        assert_close(master, w, 4.0)
        assert_close(average, m)
        assert_close(square, v)
        assert torch.equal(param, master.to(param_dtype))
        assert torch.equal(grad, kept)


def test_without_memory_the_average_is_the_gradient_however_large_it_was_before(library: Library) -> None:
    average, grad = torch.full((40,), 1e6), randn(40)
    hk.adamw_(None, torch.zeros(40), average, torch.zeros(40), grad, step=2, lr=0.1, betas=(0.0, 0.9))
    assert torch.equal(average, grad)


def test_a_skipped_step_changes_no_bit(library: Library) -> None:
    tensors = [randn(100, dtype=torch.bfloat16), randn(100), randn(100, seed=1), randn(100, seed=2)]
    kept = [tensor.clone() for tensor in tensors]
    hk.adamw_(*tensors, torch.full((100,), NAN), step=1, lr=1.0, skip=torch.tensor(1.0))
    assert all(torch.equal(a, b) for a, b in zip(tensors, kept, strict=True))


def test_nothing_beside_the_buffers_is_touched(library: Library) -> None:
    memory = torch.full((5, 4099), 7.0)
    views = [row[1:4098] for row in memory]
    hk.adamw_(views[0], *(v.fill_(0.5) for v in views[1:4]), torch.ones(4097), step=1, lr=0.1)
    assert (memory[:, [0, 4098]] == 7.0).all()
    assert (memory[4] == 7.0).all()


def test_the_squared_norm_covers_many_tensors_of_all_dtypes_once(library: Library) -> None:
    tensors = [randn(size, dtype=dtype, seed=size) for size in (*SIZES, 0, 70000) for dtype in DTYPES]
    tensors.append(randn(8, 6).t()[::2])
    expected = sum((t.double() ** 2).sum() for t in tensors)
    result = hk.squared_norm(tensors)
    assert result.dtype == torch.float64
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=0)
    assert torch.equal(result, hk.squared_norm(tensors))
    assert hk.squared_norm([]) == 0
    assert hk.squared_norm([torch.empty(0)]) == 0
    assert hk.squared_norm([torch.tensor([1e30]), torch.tensor([3.0, NAN])]).isnan()
    torch.testing.assert_close(hk.squared_norm([torch.full((4,), 1e30)]).sqrt().item(), 2e30)


@pytest.mark.parametrize("size", SIZES)
def test_scale_and_cast_rounds_once(library: Library, size: int) -> None:
    for source in DTYPES:
        for dtype in DTYPES:
            x, overflow = randn(size, dtype=source), torch.zeros(1)
            result = hk.scale_cast(x, dtype=dtype, scale=torch.tensor(0.3), factor=2.0, overflow=overflow)
            assert torch.equal(result, (x.float() * (torch.tensor(0.3) * 2.0)).to(dtype))
            assert overflow == 0


@pytest.mark.parametrize(
    ("value", "dtype"), [(INF, torch.float32), (NAN, torch.bfloat16), (-INF, torch.float16), (7e4, torch.float16)]
)
def test_one_result_that_is_not_finite_raises_the_flag_and_nothing_lowers_it(
    library: Library, value: float, dtype: torch.dtype
) -> None:
    for size in (1, 33, 1000):
        for place in {0, size // 2, size - 1}:
            x, overflow = torch.ones(size), torch.zeros(1)
            x[place] = value
            hk.scale_cast(x, dtype=dtype, overflow=overflow)
            assert overflow == 1
            hk.scale_cast(torch.ones(size), overflow=overflow)
            assert overflow == 1


def test_every_bf16_and_fp16_number_is_widened_and_rounded_as_torch_does(library: Library) -> None:
    bits = torch.arange(-(2**15), 2**15, 1 if library.widest == 0 else 7, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        x = bits.view(dtype)
        wide = hk.scale_cast(x, dtype=torch.float32)
        assert torch.equal(wide.nan_to_num(1.5), x.float().nan_to_num(1.5))
        assert torch.equal(hk.scale_cast(wide, dtype=dtype).nan_to_num(1.5), x.nan_to_num(1.5))
        # Halfway cases and their neighbours, subnormal results, and numbers too large for fp16.
        ulp = wide.abs() * 2.0 ** (-9 if dtype == torch.bfloat16 else -12)
        for shift in (ulp, ulp * 1.0001, ulp * 0.9999):
            near = (wide + shift).nan_to_num(1.5)
            assert torch.equal(hk.scale_cast(near, dtype=dtype), near.to(dtype))


def test_scaling_in_place_and_from_views_works(library: Library) -> None:
    x = randn(6, 7)
    expected = x.t() * 0.5
    assert torch.equal(hk.scale_cast(x.t(), factor=0.5), expected)
    assert hk.scale_cast(x, factor=0.5, out=x) is x
    assert torch.equal(x, expected.t())


def test_what_does_not_fit_is_refused_before_anything_changes() -> None:
    w, m, v, g = (torch.ones(4) for _ in range(4))
    for call in (
        lambda: hk.adamw_(None, w, m, v, torch.ones(5), step=1, lr=1.0),
        lambda: hk.adamw_(None, w, m.half(), v, g, step=1, lr=1.0),
        lambda: hk.adamw_(None, w, m, v, torch.ones(8)[::2], step=1, lr=1.0),
        lambda: hk.adamw_(None, w, m, v, g, step=0, lr=1.0),
        lambda: hk.adamw_(None, w, m, v, g, step=1, lr=1.0, betas=(1.0, 0.9)),
        lambda: hk.adamw_(None, w, m, v, g, step=1, lr=1.0, scale=torch.ones(2)),
        lambda: hk.adamw_(None, w, m, v, g, step=1, lr=1.0, skip=torch.tensor(1)),
        lambda: hk.scale_cast(w, out=torch.empty(5)),
        lambda: hk.scale_cast(w, out=torch.empty(4), dtype=torch.float16),
        lambda: hk.squared_norm([torch.ones(3, dtype=torch.int64)]),
        lambda: hk.squared_norm([w, torch.ones(3, device="meta")]),
    ):
        with pytest.raises(KernelInputError):
            call()
        assert torch.equal(w, torch.ones(4))
