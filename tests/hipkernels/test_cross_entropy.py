from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import pipert.hipkernels as hk
from pipert.hipkernels.errors import KernelInputError
from pipert.hipkernels.runtime import Library
from tests.hipkernels.check import DTYPES, SIZES, assert_close, double, leaf, randn


def targets_for(rows: int, columns: int) -> torch.Tensor:
    """First, middle, last, ignored and others."""
    special = [0, columns // 2 - (columns > 1), columns // 2, columns - 1, -100]
    return torch.tensor([special[row] if row < 5 else row % columns for row in range(rows)])


@pytest.mark.parametrize("columns", SIZES)
def test_losses_and_gradients_equal_float64(library: Library, columns: int) -> None:
    for dtype in DTYPES if columns < 1000 or columns == 1024 else DTYPES[:1]:
        for smoothing in (0.0, 0.1):
            logits, targets, gradient = (
                leaf(2 * randn(6, columns, dtype=dtype)),
                targets_for(6, columns),
                randn(6, seed=1),
            )
            losses = hk.cross_entropy(logits, targets, smoothing=smoothing)
            losses.backward(gradient)
            logits64 = double(logits)
            losses64 = F.cross_entropy(logits64, targets, reduction="none", label_smoothing=smoothing)
            losses64.backward(gradient.double())
            assert_close(losses, losses64, 4.0, "losses")
            assert_close(logits.grad, logits64.grad, 1.0, "gradient")
            assert losses[4] == 0
            assert (logits.grad[4] == 0).all()


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("shift", [0.0, 1000.0, -1000.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_vocabulary_shared_out_gives_the_losses_of_the_whole(
    library: Library, shards: int, shift: float, smoothing: float
) -> None:
    vocabulary, each = 61, -(-61 // shards)
    logits, targets, gradient = randn(7, vocabulary) + shift, targets_for(7, vocabulary), randn(7, seed=4)
    padded = F.pad(logits, (0, each * shards - vocabulary), value=50.0 + shift)
    pieces = [piece.contiguous() for piece in padded.split(each, 1)]
    widths = [min(each, vocabulary - first) for first in range(0, vocabulary, each)]
    places = list(zip(pieces, range(0, vocabulary, each), widths, strict=True))
    statistics = [hk.cross_entropy_statistics(p, targets, first=first, vocabulary=width) for p, first, width in places]
    maximum = torch.stack([s[0] for s in statistics]).amax(0)
    sums = sum(hk.cross_entropy_sums(s, maximum, width) for s, (_, _, width) in zip(statistics, places, strict=True))
    losses = hk.cross_entropy_losses(sums, maximum, targets, vocabulary, smoothing=smoothing)
    for piece, first, width in places:
        result = hk.cross_entropy_gradient_(
            piece, targets, maximum, sums, gradient, first=first, columns=width, vocabulary=vocabulary,
            smoothing=smoothing,
        )  # fmt: skip
        assert result is piece
    logits64 = double(logits)
    losses64 = F.cross_entropy(logits64, targets, reduction="none", label_smoothing=smoothing)
    losses64.backward(gradient.double())
    assert_close(losses, losses64, 10.0 if shift == 0 else 200.0, "losses")
    whole = torch.cat(pieces, 1)
    assert_close(whole[:, :vocabulary], logits64.grad, 1.0, "gradient")
    assert (whole[:, vocabulary:] == 0).all()


def test_padded_columns_have_no_probability(library: Library) -> None:
    logits, targets = leaf(F.pad(randn(5, 61), (0, 3), value=1e4)), targets_for(5, 61)
    losses = hk.cross_entropy(logits, targets, vocabulary=61)
    losses.sum().backward()
    logits64 = double(logits[:, :61])
    losses64 = F.cross_entropy(logits64, targets, reduction="none")
    losses64.sum().backward()
    assert_close(losses, losses64, 4.0)
    assert_close(logits.grad[:, :61], logits64.grad)
    assert (logits.grad[:, 61:] == 0).all()


def test_the_gradient_may_overwrite_the_logits(library: Library) -> None:
    base, targets = randn(3, 4, 33), targets_for(12, 33).reshape(3, 4)
    expected = leaf(base)
    hk.cross_entropy(expected, targets).sum().backward()
    kept = leaf(base)
    logits = kept * 1.0
    hk.cross_entropy(logits, targets, overwrite=True).sum().backward()
    assert torch.equal(kept.grad, expected.grad)
    assert torch.equal(logits.detach(), expected.grad)


def test_infinite_logits_do_as_torch_does(library: Library) -> None:
    logits = randn(4, 50)
    logits[0, :30] = -torch.inf
    logits[1, 10:] = -torch.inf
    logits[2, 3] = torch.nan
    targets = torch.tensor([40, 3, 1, 2])
    x, x64 = leaf(logits), double(logits)
    losses, losses64 = hk.cross_entropy(x, targets), F.cross_entropy(x64, targets, reduction="none")
    losses[[0, 1, 3]].sum().backward()
    losses64[[0, 1, 3]].sum().backward()
    assert_close(losses, losses64, 4.0)
    assert_close(x.grad[[0, 1, 3]], x64.grad[[0, 1, 3]])


def test_views_and_expanded_gradients_are_right(library: Library) -> None:
    base, targets = leaf(randn(33, 8)), targets_for(8, 33)
    hk.cross_entropy(base.t(), targets).backward(torch.ones(()).expand(8))
    base64 = double(base)
    F.cross_entropy(base64.t(), targets, reduction="sum").backward()
    assert_close(base.grad, base64.grad)


def test_gradients_are_those_of_finite_differences() -> None:
    logits, targets = leaf(randn(6, 9).double()), targets_for(6, 7)
    for smoothing in (0.0, 0.2):
        for width, vocabulary in ((7, None), (9, 7)):
            assert torch.autograd.gradcheck(
                lambda a, s=smoothing, w=width, v=vocabulary: hk.cross_entropy(
                    a[:, :w], targets, smoothing=s, vocabulary=v
                ),
                (logits,),
            )


def test_targets_outside_the_vocabulary_and_other_misfits_are_refused() -> None:
    logits = randn(3, 61)
    targets = torch.tensor([60, 0, -100])
    hk.cross_entropy(logits, targets)
    maximum, *sums = hk.cross_entropy_statistics(logits, targets)
    sums = torch.stack(sums)
    for call in (
        lambda: hk.cross_entropy(logits, torch.tensor([61, 0, 1])),
        lambda: hk.cross_entropy(logits, torch.tensor([-1, 0, 1])),
        lambda: hk.cross_entropy(logits, torch.tensor([60, 0, 1]), vocabulary=60),
        lambda: hk.cross_entropy(logits, torch.tensor([0, 1])),
        lambda: hk.cross_entropy(logits, torch.tensor([0, 1, 2]).int()),
        lambda: hk.cross_entropy(logits, torch.tensor([0, 1, 2]), vocabulary=62),
        lambda: hk.cross_entropy(logits, torch.tensor([0, 1, 2]), smoothing=1.5),
        lambda: hk.cross_entropy_statistics(randn(2, 3, 61), torch.zeros(2, 3, dtype=torch.int64)),
        lambda: hk.cross_entropy_gradient_(randn(3, 61), targets, maximum[:1], sums, torch.ones(3)),
        lambda: hk.cross_entropy_gradient_(randn(3, 61), targets, maximum, sums[:, :2], torch.ones(3)),
        lambda: hk.cross_entropy_gradient_(randn(3, 61), targets, maximum, sums, torch.ones(1)),
    ):
        with pytest.raises(KernelInputError):
            call()
