"""Matrices decay, vectors do not, frozen weights are nowhere."""

from __future__ import annotations

import torch

from pipert.models import GPT, GPTConfig
from pipert.optim import decay_groups


def test_matrices_and_embeddings_decay_and_norms_and_biases_do_not() -> None:
    model = GPT(GPTConfig(layers=2, hidden=8, heads=2, sequence=4, vocabulary=11))
    decay, plain = decay_groups(model.named_parameters(), 0.1)
    assert (decay["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert "embedding.weight" in decay["names"] and "blocks.1.mlp.down.weight" in decay["names"]
    assert "norm.weight" in plain["names"] and "blocks.0.attention.qkv.bias" in plain["names"]
    assert len(decay["names"]) + len(plain["names"]) == len(list(model.parameters()))


def test_frozen_parameters_are_left_out_and_an_empty_group_is_one() -> None:
    model = torch.nn.Linear(3, 3)
    model.bias.requires_grad_(False)
    decay, plain = decay_groups(model.named_parameters(), 0.1)
    assert decay["names"] == ["weight"] and plain["params"] == []
    optimizer = torch.optim.AdamW([decay, plain])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
