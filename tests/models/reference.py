"""A GPT written a second time, in plain torch and nothing of pipert: slow, explicit, head by head."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

Weights = Mapping[str, torch.Tensor]


def logits(config: Any, weights: Weights, ids_BT: torch.Tensor) -> torch.Tensor:
    """Logits (B, T, V) of a GPT with these weights, named as in its ``state_dict``."""
    x = torch.stack([weights["embedding.weight"][row] for row in ids_BT])
    if config.positions == "learned":
        x = x + torch.stack([weights["embedding.position"][t] for t in range(ids_BT.shape[1])])
    for index in range(config.layers):
        here = {name.removeprefix(f"blocks.{index}."): value for name, value in weights.items()}
        x = x + attention(config, here, norm(config, here, "attention_norm", x))
        x = x + mlp(config, here, norm(config, here, "mlp_norm", x))
    table = weights["embedding.weight" if config.tied else "head.weight"]
    return norm(config, weights, "norm", x) @ table.T


def norm(config: Any, weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    if config.norm == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    y = x * (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).rsqrt() * weights[f"{name}.weight"]
    return y + weights.get(f"{name}.bias", torch.zeros(()))


def linear(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", torch.zeros((), dtype=x.dtype))


def attention(config: Any, weights: Weights, x_BTH: torch.Tensor) -> torch.Tensor:
    width = config.hidden // config.heads
    shared = config.kv_heads or config.heads
    rows = linear(weights, "attention.qkv", x_BTH)
    pieces = [rows[..., start : start + width] for start in range(0, rows.shape[-1], width)]
    queries, keys, values = pieces[: config.heads], pieces[config.heads :][:shared], pieces[config.heads + shared :]
    positions = x_BTH.shape[1]
    future = torch.ones(positions, positions, dtype=torch.bool).triu(1)
    out = []
    for index, q in enumerate(queries):
        group = index * shared // config.heads
        k, v = keys[group], values[group]
        if config.positions == "rotary":
            q, k = turned(q, config.rotary_base), turned(k, config.rotary_base)
        scores = (q @ k.transpose(1, 2) / math.sqrt(width)).masked_fill(future, -math.inf)
        weights_BTT = torch.exp(scores - scores.amax(-1, keepdim=True))
        out.append(weights_BTT / weights_BTT.sum(-1, keepdim=True) @ v)
    return linear(weights, "attention.out", torch.cat(out, -1))


def turned(x_BTD: torch.Tensor, base: float) -> torch.Tensor:
    """Rotary positions with complex numbers: pair (d, d + D/2) is one number."""
    half = x_BTD.shape[-1] // 2
    pairs = torch.complex(x_BTD[..., :half], x_BTD[..., half:])
    angles = [[t / base ** (2 * d / (2 * half)) for d in range(half)] for t in range(x_BTD.shape[1])]
    turned_pairs = pairs * torch.exp(1j * torch.tensor(angles, dtype=x_BTD.dtype))
    return torch.cat((turned_pairs.real, turned_pairs.imag), -1)


def mlp(config: Any, weights: Weights, x: torch.Tensor) -> torch.Tensor:
    up = linear(weights, "mlp.up", x)
    if config.activation == "swiglu":
        gate, up = up[..., : up.shape[-1] // 2], up[..., up.shape[-1] // 2 :]
        inner = gate * torch.sigmoid(gate) * up
    else:
        inner = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
    return linear(weights, "mlp.down", inner)


def loss(logits_BTV: torch.Tensor, targets_BT: torch.Tensor, ignore: int = -100) -> torch.Tensor:
    """Mean negative log likelihood of the targets that count, token by token."""
    terms = [
        torch.logsumexp(row, 0) - row[target]
        for row, target in zip(logits_BTV.flatten(0, 1), targets_BT.flatten(), strict=True)
        if target != ignore
    ]
    return torch.stack(terms).mean()
