"""Training with kernels: the same numbers in every layout, the reference's within rounding, ready before a step."""

from __future__ import annotations

import pytest
import torch

import pipert
import pipert.hipkernels as hk
from pipert.engine.reference import reference_step
from pipert.errors import ConfigError
from pipert.models import GPT, CausalLMLoss, GPTConfig
from tests.engine.world import Outcome, run_pipeline

SHAPE = {"layers": 4, "hidden": 32, "heads": 4, "sequence": 16, "vocabulary": 61, "dropout": 0.2, "tied": False}
CONFIGS = {
    "layernorm-gelu": GPTConfig(**SHAPE),
    "rmsnorm-swiglu-rotary": GPTConfig(
        **SHAPE, norm="rmsnorm", activation="swiglu", positions="rotary", bias=False, kv_heads=2
    ),
}
IDS, TARGETS = torch.randint(61, (2, 6, 16), generator=torch.Generator().manual_seed(0))
TARGETS[0, :5] = -100


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> GPTConfig:
    return CONFIGS[request.param]


def one_process(config: GPTConfig, dtype: torch.dtype = torch.float32) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of three micro-batches."""
    model = GPT(config, device="cpu", dtype=dtype)
    loss = reference_step(model, CausalLMLoss(), (IDS, TARGETS), 3).loss
    return loss, {name: parameter.grad for name, parameter in model.named_parameters()}


def pipeline(config: GPTConfig, pp: int, **options: object) -> Outcome:
    return run_pipeline(GPT(config), CausalLMLoss(), [[(IDS, TARGETS)]], pp, microbatches=3, **options)


@pytest.mark.parametrize(
    ("pp", "schedule", "recompute"), [(1, "1f1b", "block"), (2, "zb-h1", "full"), (4, "1f1b", "none")]
)
def test_every_layout_has_bitwise_the_numbers_of_one_process(
    config: GPTConfig, pp: int, schedule: str, recompute: str
) -> None:
    loss, gradients = one_process(config)
    outcome = pipeline(config, pp, schedule=schedule, recompute=recompute)
    assert outcome.results[0].loss == loss
    assert outcome.gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(outcome.gradients[name], gradient), name


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_kernels_equal_the_reference_within_rounding(
    config: GPTConfig, dtype: torch.dtype, rounding: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, gradients = one_process(config, dtype)
    monkeypatch.setenv("PIPERT_KERNELS", "reference")
    expected, wanted = one_process(config, dtype)
    assert loss == pytest.approx(expected, rel=rounding)
    differ = 0
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, wanted[name], rtol=rounding, atol=rounding * wanted[name].abs().max().item(), msg=name
        )
        differ += not torch.equal(gradient, wanted[name])
    assert differ > len(gradients) / 2  # they were two computations


def test_kernels_are_ready_before_the_first_step(config: GPTConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(hk, "prepare", lambda device: asked.append(device) or "kernels")
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    pipert.Pipeline(plain, torch.nn.functional.mse_loss, pipert.Mesh.local(), microbatches=1)
    assert not asked  # nothing of it has kernels
    pipert.Pipeline(GPT(config), CausalLMLoss(), pipert.Mesh.local(), microbatches=1)
    assert asked == [torch.device("cpu")]


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, [torch.device("cpu")]), (torch.float64, [])])
def test_the_optimizers_kernels_are_ready_before_the_first_step(
    dtype: torch.dtype, expected: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.device] = []
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)).to(dtype)
    pipe = pipert.Pipeline(plain, torch.nn.functional.mse_loss, pipert.Mesh.local(), microbatches=1)
    monkeypatch.setattr(hk, "prepare", lambda device: asked.append(device) or "kernels")
    pipert.ZeroAdamW(pipe)
    assert asked[:1] == expected


def test_ranks_of_which_only_some_have_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ["kernels", "reference"]
    monkeypatch.setattr(hk, "prepare", lambda device: answers.pop())
    with pytest.raises(ConfigError, match="of PIPERT_KERNELS: '"):
        pipeline(CONFIGS["layernorm-gelu"], 2)


def test_what_the_environment_asks_for_in_vain_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPERT_KERNELS", "sometimes")
    with pytest.raises(ConfigError, match="auto, reference, required"):
        pipeline(CONFIGS["layernorm-gelu"], 2)
