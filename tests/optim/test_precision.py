"""The table of precisions, and in what gradients are added up."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from pipert.errors import ConfigError
from pipert.optim.precision import LEGAL, Precision, accumulate, accumulates_in

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def test_a_precision_is_one_of_the_table_or_refused_with_the_table() -> None:
    for row in itertools.product(DTYPES, repeat=3):
        if row in LEGAL:
            assert (Precision(*row).parameters, Precision(*row).gradients, Precision(*row).master) == row
        else:
            with pytest.raises(ConfigError, match=r"do not go together; use .*bfloat16, float32, float32"):
                Precision(*row)


def test_names_stand_for_float32_gradients_and_masters_where_parameters_are_half() -> None:
    assert Precision.of("bf16") == Precision(torch.bfloat16, torch.float32, torch.float32)
    assert Precision.of("fp16") == Precision(torch.float16, torch.float32, torch.float32)
    assert Precision.of("fp64") == Precision(torch.float64) == Precision.of(None, torch.float64)
    assert Precision.of(None) is None
    assert Precision.of(None, torch.complex64) is None


@pytest.mark.parametrize(
    ("value", "dtype", "words"),
    [("fp8", None, "none of fp32, bf16"), ("bf16", torch.float32, "contradicts"), (torch.float32, None, "none of")],
)
def test_what_is_no_precision_is_refused(value: str, dtype: torch.dtype | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Precision.of(value, dtype)


def test_bytes_of_a_parameter() -> None:
    assert [Precision.of(name).state_bytes() for name in ("fp32", "bf16", "fp64")] == [16, 18, 32]  # type: ignore[union-attr]
    assert Precision(torch.bfloat16, torch.bfloat16).state_bytes() == 16
    assert Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16).state_bytes() == 8


def test_small_gradients_are_not_lost_in_a_half_precision_sum() -> None:
    weight = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    accumulate([weight])
    weight.sum().backward()
    for _ in range(256):
        (weight * 0.002).sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    assert weight.grad.tolist() == pytest.approx([1.512] * 3, abs=1e-3)


def test_a_gradient_that_is_there_is_converted_and_a_precision_may_say_otherwise() -> None:
    weight = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    weight.grad = torch.ones(2, dtype=torch.bfloat16)
    accumulate([weight])
    assert weight.grad.dtype == accumulates_in(weight) == torch.float32
    accumulate([weight], Precision(torch.bfloat16, torch.bfloat16))
    assert weight.grad.dtype == accumulates_in(weight) == torch.bfloat16


def test_other_parameters_stay_as_they_are() -> None:
    parameters = [nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    parameters.append(nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False))
    accumulate(parameters)
    assert [accumulates_in(parameter) for parameter in parameters] == [p.dtype for p in parameters]
