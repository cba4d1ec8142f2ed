"""Models with every kind of structure that a pipeline meets."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    """A residual layer, with a window size that nothing shows."""

    def __init__(self, width: int, index: int = 0, window: int = 4) -> None:
        super().__init__()
        self.index = index
        self.window = window
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Skipping(nn.Module):
    """Block 1's output is added into block 6; positions are a bare parameter; the head is the embedding's weight."""

    def __init__(self, width: int = 32, vocabulary: int = 61) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(16, width))
        self.layers = nn.ModuleList(Layer(width, i) for i in range(8))
        self.norm = nn.LayerNorm(width)
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, ids: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        _, length = ids.size()
        assert length <= 16
        x = self.embedding(ids) + self.position[:length]
        kept = x
        for i, layer in enumerate(self.layers):
            if i == 6:
                x = x + kept
            x = layer(x)
            if i == 1:
                kept = x
        logits = F.linear(self.norm(x) * self.scale, self.embedding.weight)
        return logits if bias is None else logits + bias


class Result(NamedTuple):
    logits: torch.Tensor
    hidden: dict[str, torch.Tensor]


class Towers(nn.Module):
    """Two inputs, two branches, a named output with an inner value."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.right = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.join = nn.Linear(2 * width, width)

    def forward(self, a: torch.Tensor, b: torch.Tensor, *, scale: float = 1.0) -> Result:
        mask = (a > 0).to(a.dtype)
        for left in self.left:
            a = left(a) * mask
        for right in self.right:
            b = torch.relu(right(b))
        return Result(self.join(torch.cat([a, b], -1)) * scale, {"a": a, "b": b})


class Shared(nn.Module):
    """One layer used three times."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layer = Layer(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(3):
            x = self.layer(x)
        return x


class Early(nn.Module):
    """Returns a value of its first layer beside the last one."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden = []
        for layer in self.layers:
            x = layer(x)
            hidden.append(x)
        return {"last": x, "early": [hidden[0], (hidden[2],)], "kind": "toy"}


class InPlace(nn.Module):
    """Changes a value in place between its uses, and has another name for the change."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](a)
        y = x * b  # before the change
        x.add_(1.0)
        x = self.layers[2](self.layers[1](x))
        x += 2.0
        return self.layers[3](x + y)


class Spread(nn.Module):
    """Takes and gives a dict, with ids, a mask and an empty tensor on the way."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        x = self.linear(value["x"]) * value["mask"].unsqueeze(-1)
        return {**value, "x": x, "pair": (x.detach(), value["ids"])}


class Last(nn.Module):
    def forward(self, value: dict[str, Any]) -> torch.Tensor:
        return value["x"].sum(-1) + value["pair"][1]


def nested(width: int = 8, length: int = 4) -> nn.Sequential:
    """A chain of blocks that hand a dict on."""
    return nn.Sequential(*(Spread(width) for _ in range(length)), Last())


def nested_input(width: int = 8) -> dict[str, Any]:
    return {
        "x": torch.randn(2, 5, width),
        "ids": torch.arange(10).reshape(2, 5),
        "mask": torch.rand(2, 5) > 0.3,
        "nothing": torch.empty(0),
    }
