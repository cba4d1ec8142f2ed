"""The loss is a mean over the tokens that count, and stays finite when none does."""

from __future__ import annotations

import pytest
import torch

from pipert.models import CausalLMLoss, token_cross_entropy


def test_ignored_tokens_neither_count_nor_get_gradients() -> None:
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([[0, 4, 7], [7, 7, 2]])
    loss = CausalLMLoss(ignore_index=7)(logits, targets)
    counted = [(0, 0), (0, 1), (1, 2)]
    expected = -sum(logits[b, t].log_softmax(-1)[targets[b, t]] for b, t in counted) / 3
    torch.testing.assert_close(loss, expected)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert (gradient.abs().sum(-1) > 0).nonzero().tolist() == [list(place) for place in counted]


def test_a_batch_that_is_all_ignored_has_loss_and_gradients_of_zero() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = token_cross_entropy(logits, torch.full((2, 3), -100))
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad.abs().sum() == 0


def test_logits_far_from_zero_and_in_half_precision_are_summed_in_float32() -> None:
    logits = torch.randn(4, 9)
    targets = torch.tensor([0, 3, 8, -100])
    torch.testing.assert_close(
        token_cross_entropy(logits + 1000.0, targets), token_cross_entropy(logits, targets), rtol=1e-3, atol=1e-4
    )
    loss = token_cross_entropy(logits.bfloat16(), targets)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, token_cross_entropy(logits.bfloat16().float(), targets))


def test_a_target_outside_of_the_vocabulary_is_refused() -> None:
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        token_cross_entropy(torch.zeros(1, 5), torch.tensor([5]))
