"""Shapes are checked when they are made, and their formulas are exact."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pipert.errors import ConfigError
from pipert.gpt_config import GPTConfig
from pipert.models import GPT

CASES: dict[str, Any] = {"layers": 8, "hidden": 32, "heads": 4, "sequence": 16, "vocabulary": 61}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 30}, r"hidden 30 / heads 4 leaves 2 over.* hidden 28 or 32"),
        ({"hidden": 3}, r"hidden 3 / heads 4 .* hidden 4 or 4"),
        ({"kv_heads": 3}, r"4 heads cannot share 3 kv_heads evenly; use one of \[1, 2, 4\]"),
        ({"kv_heads": 8}, "4 heads cannot share 8 kv_heads"),
        ({"kv_heads": 0}, "kv_heads is 0; .* at least 1"),
        ({"hidden": 12, "positions": "rotary"}, r"hidden 12 / heads 4 = 3 is odd.*even head width"),
        ({"layers": 0}, "layers is 0"),
        ({"sequence": 1.5}, r"sequence is 1\.5; it must be a whole number"),
        ({"vocabulary": True}, "vocabulary is True"),
        ({"mlp": -8}, "mlp is -8"),
        ({"norm": "batchnorm"}, "norm is 'batchnorm'; choose one of layernorm, rmsnorm"),
        ({"positions": "none"}, "choose one of learned, rotary"),
        ({"activation": "relu"}, "choose one of gelu, swiglu"),
        ({"dropout": 1.0}, r"dropout is 1\.0; .* below 1"),
        ({"dropout": float("nan")}, "dropout is nan"),
        ({"init_std": 0.0}, r"init_std is 0\.0; it must be above 0"),
        ({"init_std": float("inf")}, "init_std is inf; it must be above 0 and finite"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_with_values_rule_and_remedy(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GPTConfig(**{**CASES, **change})


def test_a_config_is_a_value() -> None:
    assert GPTConfig(**CASES) == GPTConfig(**CASES)
    assert len({GPTConfig(**CASES), GPTConfig(**CASES), GPTConfig(**CASES, bias=False)}) == 2
    with pytest.raises(AttributeError):
        GPTConfig(**CASES).layers = 3  # type: ignore[misc]
    assert eval(repr(GPTConfig(**CASES))) == GPTConfig(**CASES)


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        (GPTConfig(layers=12, hidden=768, heads=12, sequence=1024, vocabulary=50257), 124_439_808),  # GPT-2
        (
            GPTConfig(  # Llama 3 8B
                layers=32, hidden=4096, heads=32, kv_heads=8, mlp=14336, sequence=8192, vocabulary=128256,
                positions="rotary", norm="rmsnorm", activation="swiglu", bias=False, tied=False,
            ),
            8_030_261_248,
        ),
    ],
)  # fmt: skip
def test_published_models_have_their_published_sizes(shape: GPTConfig, parameters: int) -> None:
    assert shape.parameters == parameters
    assert sum(parameter.numel() for parameter in GPT(shape).parameters()) == parameters


def test_operations_of_the_reference_model_equal_a_hand_count() -> None:
    matrices = 32 * 96 + 32 * 32 + 32 * 128 + 128 * 32  # qkv, out, up, down
    scores = 2 * 16 * 32 + 2 * 16 * 32  # q k^T and weights times v, over 16 positions and 4 heads of 8
    forward = 8 * (2 * matrices + scores) + 2 * 32 * 61
    assert GPTConfig(**CASES).forward_flops() == forward == 216_896
    assert GPTConfig(**CASES).training_flops() == 3 * forward
    assert GPTConfig(**CASES).training_flops(recompute=True) == 3 * forward + 8 * (2 * matrices + scores)


@pytest.mark.parametrize("options", [{}, {"activation": "swiglu", "mlp": 40}, {"kv_heads": 2, "tied": False}])
@pytest.mark.parametrize("positions", [16, 9])
def test_operations_equal_what_torch_counts(options: dict[str, Any], positions: int) -> None:
    config = GPTConfig(**CASES, **options)
    model = GPT(config, "cpu")
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = model(torch.zeros(3, positions, dtype=torch.int64))
        assert counter.get_total_flops() == config.forward_flops(positions) * 3 * positions
        out.sum().backward()
    assert counter.get_total_flops() == config.training_flops(positions) * 3 * positions


def test_the_shape_needs_no_torch() -> None:
    program = "import sys, pipert.gpt_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
