from __future__ import annotations

import pytest
import torch

import pipert.hipkernels as hk
from pipert.hipkernels.errors import KernelInputError
from pipert.hipkernels.reference.dropout import kept, philox
from pipert.hipkernels.runtime import Library
from tests.hipkernels.check import DTYPES, SIZES, assert_close, leaf, randn


def keys(samples: int = 5) -> torch.Tensor:
    """Of samples, on the device that is tested."""
    return torch.tensor([1, -7, 2**62, 0, 2**40 + 5][:samples])


def test_philox_gives_the_published_words() -> None:
    """The known answers of Random123: counter and key of zeros, and of ones."""
    words = philox(torch.tensor([0]), torch.tensor([0]))[0]
    assert [f"{word:08x}" for word in words.tolist()] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]


@pytest.mark.parametrize("columns", SIZES)
def test_dropout_and_its_gradients_equal_the_reference_mask(library: Library, columns: int) -> None:
    samples = 5 if columns < 1000 else 2
    for dtype in DTYPES if columns < 100 or columns == 1024 else DTYPES[:1]:
        x, residual = (
            leaf(randn(samples, 3, columns, dtype=dtype)),
            leaf(randn(samples, 3, columns, dtype=dtype, seed=1)),
        )
        bias, dy = leaf(randn(columns)), randn(samples, 3, columns, dtype=dtype, seed=2)
        y = hk.bias_dropout_add(x, bias, residual, p=0.3, keys=keys(samples), offset=8)
        y.backward(dy)
        mask = kept(keys(samples), 3 * columns, 8, round(0.3 * 2**32)).reshape(x.shape)
        factor = mask / 0.7
        assert_close(y, (x.double() + bias.double()) * factor + residual.double(), 4.0, "y")
        assert_close(x.grad, dy.double() * factor, 1.0, "dx")
        assert_close(bias.grad, (dy.double() * factor).sum((0, 1)), 15.0, "dbias")
        assert torch.equal(residual.grad, dy)


@pytest.mark.parametrize(("columns", "offset"), [(64, 2**32), (64, 2**34 + 4), (63, 2**34 + 1), (63, 2**32 - 70)])
def test_masks_go_on_behind_element_2_to_the_32(library: Library, columns: int, offset: int) -> None:
    y = hk.bias_dropout_add(torch.ones(2, 3, columns), p=0.5, keys=keys(2), offset=offset)
    assert torch.equal(y != 0, kept(keys(2), 3 * columns, offset, 2**31).reshape(y.shape))


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 4, 24])
def test_a_sample_cut_in_pieces_has_the_mask_of_the_whole(library: Library, offset: int) -> None:
    whole = hk.bias_dropout_add(torch.ones(2, 40, 8), p=0.5, keys=keys(2))
    flat = whole.reshape(2, 320)[:, offset : offset + 48].reshape(2, 6, 8)
    piece = hk.bias_dropout_add(torch.ones(2, 6, 8), p=0.5, keys=keys(2), offset=offset)
    assert torch.equal(piece, flat)


def test_masks_are_of_the_probability_asked_for_and_differ_between_samples(library: Library) -> None:
    y = hk.bias_dropout_add(torch.ones(5, 20, 64), p=0.25, keys=keys())
    assert set(y.unique().tolist()) <= {0.0, 1.0 / 0.75, torch.tensor(1.0 / 0.75).item()}
    rate = (y != 0).double().mean().item()
    assert abs(rate - 0.75) < 5 * (0.25 * 0.75 / y.numel()) ** 0.5
    for other in range(1, 5):
        agree = ((y[0] != 0) == (y[other] != 0)).double().mean().item()
        assert abs(agree - (0.75**2 + 0.25**2)) < 0.06


def test_the_mask_is_the_same_in_every_mode_and_a_backward_pass_gives_the_forward_mask(
    host: Library, library: Library
) -> None:
    from pipert.hipkernels.runtime import use

    x = leaf(torch.ones(3, 7, 12))
    y = hk.bias_dropout_add(x, p=0.5, keys=keys(3))
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    with use(host):
        assert torch.equal(hk.bias_dropout_add(torch.ones(3, 7, 12), p=0.5, keys=keys(3)), y)


def test_probabilities_zero_and_one_keep_all_and_nothing(library: Library) -> None:
    x = randn(2, 3, 9)
    x[0, 0, 0] = float("inf")
    assert torch.equal(hk.bias_dropout_add(x, p=0.0, keys=keys(2)), x)
    assert torch.equal(hk.bias_dropout_add(x[1:], p=1.0, keys=keys(1)), torch.zeros(1, 3, 9))


def test_views_as_gradients_and_out_are_right(library: Library) -> None:
    x, bias = leaf(randn(4, 6, 8)), leaf(randn(8))
    hk.bias_dropout_add(x.transpose(1, 2)[..., :6].transpose(1, 2), bias, p=0.5, keys=keys(4)).backward(
        torch.ones(()).expand(4, 6, 8)
    )
    factor = kept(keys(4), 48, 0, 2**31).reshape(4, 6, 8) * 2.0
    assert_close(x.grad, factor.double())
    assert_close(bias.grad, factor.double().sum((0, 1)))
    residual = randn(4, 6, 8, seed=3)
    expected = hk.bias_dropout_add(x.detach(), None, residual, p=0.5, keys=keys(4))
    assert torch.equal(hk.bias_dropout_add(x, None, residual, p=0.5, keys=keys(4), out=residual), expected)


def test_gradients_are_those_of_finite_differences() -> None:
    x, bias, residual = leaf(randn(2, 3, 5).double()), leaf(randn(5).double()), leaf(randn(2, 3, 5, seed=1).double())
    assert torch.autograd.gradcheck(
        lambda *a: hk.bias_dropout_add(*a, p=0.4, keys=keys(2), offset=3), (x, bias, residual)
    )


def test_what_does_not_fit_is_refused() -> None:
    x = randn(2, 3, 4)
    for call in (
        lambda: hk.bias_dropout_add(x, p=0.5, keys=keys()),
        lambda: hk.bias_dropout_add(x, p=0.5, keys=keys(2).int()),
        lambda: hk.bias_dropout_add(x, p=1.5, keys=keys(2)),
        lambda: hk.bias_dropout_add(x, p=0.5, keys=keys(2), offset=-4),
        lambda: hk.bias_dropout_add(x, randn(3), p=0.5, keys=keys(2)),
        lambda: hk.bias_dropout_add(x, None, randn(2, 3), p=0.5, keys=keys(2)),
    ):
        with pytest.raises(KernelInputError):
            call()
