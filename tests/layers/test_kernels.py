"""Layers call kernels where those do what torch's functions do, and torch's functions elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pipert.hipkernels as hk
from pipert.hipkernels.errors import KernelInputError
from pipert.layers import Dropout, LayerNorm, RMSNorm, gelu, swiglu
from pipert.layers.rotary import rotate
from pipert.models import GPT, GPTConfig
from pipert.randomness import Draw, drawing

LAYERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "layer norm": LayerNorm(8),
    "layer norm without bias": LayerNorm(8, bias=False),
    "rms norm": RMSNorm(8),
    "gelu": gelu,
    "swiglu": swiglu,
    "rotate": lambda x: rotate(x, 100.0),
}
TORCHS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "layer norm": lambda x: F.layer_norm(x, (8,)),
    "layer norm without bias": lambda x: F.layer_norm(x, (8,)),
    "rms norm": lambda x: F.rms_norm(x, (8,), eps=1e-5),
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "swiglu": lambda x: F.silu(x[..., :4]) * x[..., 4:],
}


@pytest.fixture(params=LAYERS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


class Calls(nn.Module):
    """A module of a function."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def inputs(dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    x = torch.randn(2, 4, 5, 8, generator=torch.Generator().manual_seed(seed))
    return x.to(dtype).requires_grad_()


def results(layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    y = layer(x)
    return [y, *torch.autograd.grad(y.double().square().sum(), x)]


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float64, 1e-12)])
def test_layers_are_torchs_functions_within_rounding(
    name: str, dtype: torch.dtype, rounding: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = inputs(dtype)
    layer = LAYERS[name]
    layer = layer.to(dtype) if isinstance(layer, nn.Module) else layer
    assert hk.usable(x) == (dtype != torch.float64)
    mine = results(layer, x)
    monkeypatch.setenv("PIPERT_KERNELS", "reference")
    others = [results(layer, x)] + ([results(TORCHS[name], x)] if name in TORCHS else [])
    for other in others:
        for found, expected in zip(mine, other, strict=True):
            torch.testing.assert_close(found, expected, rtol=rounding, atol=4 * rounding)
    if isinstance(layer, nn.Module):
        layer.to(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("norm", [LayerNorm(8), RMSNorm(8)], ids=["layer", "rms"])
def test_a_norm_with_a_residual_gives_the_sum_too(norm: nn.Module, dtype: torch.dtype) -> None:
    x, residual = inputs(dtype), inputs(dtype, seed=1)
    norm.to(dtype)
    y, added = norm(x, residual)
    assert torch.equal(added, x + residual)
    torch.testing.assert_close(y, norm(added.detach()), rtol=1e-6, atol=1e-6)
    ones = torch.ones_like(y)
    mine = torch.autograd.grad([y, added], [x, residual], [ones * y.detach(), ones])
    twin = added.detach().requires_grad_()
    (expected,) = torch.autograd.grad(norm(twin), twin, ones * y.detach())
    for found in mine:
        torch.testing.assert_close(found, expected + 1, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dropout_drops_the_same_elements_with_and_without_kernels(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Dropout(0.3, "d")

    def run(x: torch.Tensor, residual: torch.Tensor | None) -> list[torch.Tensor]:
        with drawing(Draw(0, 3, (7, 5))):
            return results(lambda x: layer(x, residual), x)

    x = inputs(dtype)
    for residual in (None, inputs(dtype, seed=1)):
        monkeypatch.delenv("PIPERT_KERNELS", raising=False)
        mine = run(x, residual)
        monkeypatch.setenv("PIPERT_KERNELS", "reference")
        for found, expected in zip(mine, run(x, residual), strict=True):
            # Bitwise, but for the one rounding that a sum in the same pass saves.
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
            assert residual is not None or torch.equal(found, expected)
    with drawing(Draw(0, 3, (5, 7))):
        swapped = layer(x.flip(0))
    assert torch.equal(swapped.flip(0), run(x, None)[0])


def test_samples_of_one_number_are_dropped_too() -> None:
    x = torch.ones(64)
    with drawing(Draw(0, 0, tuple(range(64)))):
        kept = Dropout(0.5, "d")(x)
        assert torch.equal(kept[:, None], Dropout(0.5, "d")(x[:, None]))
        assert torch.equal(Dropout(0.5, "d")(x, x), x + kept)
    assert set(kept.tolist()) == {0.0, 2.0}


def test_tracing_transformations_and_autocast_see_torchs_functions(name: str) -> None:
    layer, x = LAYERS[name], inputs()
    model = nn.Sequential(layer if isinstance(layer, nn.Module) else Calls(layer))
    traced = torch.fx.symbolic_trace(model)
    torch.testing.assert_close(traced(x), layer(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.vmap(layer)(x.detach()), layer(x.detach()), rtol=1e-5, atol=1e-5)
    gradient = torch.func.grad(lambda x: layer(x).square().sum())(x.detach())
    torch.testing.assert_close(gradient, results(layer, x)[1], rtol=1e-4, atol=1e-4)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), x.detach())
        assert torch.autograd.forward_ad.unpack_dual(layer(dual)).tangent is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert not hk.usable(x)


def test_second_derivatives_are_refused_with_the_remedy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def penalty() -> torch.Tensor:
        x = inputs()
        (gradient,) = torch.autograd.grad(LAYERS[name](x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), x)[0]

    if name != "rotate":  # which is linear
        with pytest.raises(KernelInputError, match="PIPERT_KERNELS=reference"):
            penalty()
    monkeypatch.setenv("PIPERT_KERNELS", "reference")
    assert penalty().isfinite().all()


def test_a_compiled_block_computes_what_the_block_does() -> None:
    for options in ({}, {"norm": "rmsnorm", "activation": "swiglu", "positions": "rotary"}):
        model = GPT(GPTConfig(layers=1, hidden=32, heads=4, sequence=16, vocabulary=61, **options), device="cpu")
        block = dict(model.blocks())["blocks.0"]
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
        x = torch.randn(2, 16, 32, requires_grad=True)
        for mine, expected in zip(results(compiled, x), results(block, x), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)


def test_importing_layers_and_models_builds_nothing(tmp_path: object) -> None:
    import os
    import subprocess
    import sys

    code = "import pipert.models, pipert.layers, pipert.engine.pipeline; pipert.models.GPT"
    environment = {**os.environ, "PIPERT_CACHE": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert not list(tmp_path.iterdir())  # type: ignore[attr-defined]
