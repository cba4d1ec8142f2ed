"""Materialised values depend on (seed, name) only, and nothing else is touched."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from pipert.errors import ConfigError
from pipert.layers import Dropout, LayerNorm, Linear, RMSNorm, materialise
from pipert.layers.initial import fill_normal


def torch_layers() -> nn.Sequential:
    """Layers of torch that know nothing of names, on the meta device."""
    with torch.device("meta"):
        return nn.Sequential(
            nn.Linear(6, 8),
            nn.Embedding(5, 8, padding_idx=2),
            nn.LayerNorm(8),
            nn.BatchNorm1d(8),
            nn.Conv1d(8, 4, 3),
            nn.MultiheadAttention(8, 2),
            nn.TransformerEncoderLayer(8, 2, 16),
            nn.GRU(4, 4),
        )


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_torchs_layers_get_the_distributions_that_torch_gives_them() -> None:
    ours = materialise(torch_layers(), "blocks.0")
    plain = nn.Sequential(nn.Linear(6, 8), nn.Embedding(5, 8, padding_idx=2), nn.LayerNorm(8), nn.BatchNorm1d(8))
    for name, tensor in plain.state_dict().items():
        got = ours.state_dict()[name]
        assert got.shape == tensor.shape and got.dtype == tensor.dtype
        if not torch.equal(got, tensor):  # random: at least within the bounds
            assert got.abs().max() <= (1 / 6**0.5 if name.startswith("0") else 5)
    assert ours[1].weight[2].abs().sum() == 0
    assert torch.equal(ours[5].out_proj.bias, torch.zeros(8))
    assert all(torch.isfinite(tensor).all() for tensor in ours.state_dict().values())


def test_values_are_the_same_every_time_and_differ_by_name_and_seed() -> None:
    first = values(materialise(torch_layers(), "blocks.0"))
    torch.manual_seed(99)
    assert same(first, values(materialise(torch_layers(), "blocks.0")))
    for other in (materialise(torch_layers(), "blocks.4"), materialise(torch_layers(), "blocks.0", seed=1)):
        assert not torch.equal(first["0.weight"], values(other)["0.weight"])
        assert not torch.equal(first["4.weight"], values(other)["4.weight"])


def test_a_submodule_has_the_values_it_has_within_its_parent() -> None:
    whole = values(materialise(torch_layers(), "model"))
    alone = torch_layers()[4]
    materialise(alone, "model.4")
    assert torch.equal(whole["4.weight"], alone.weight)


def test_the_global_generator_is_neither_read_nor_advanced() -> None:
    before = torch.get_rng_state()
    materialise(torch_layers(), "blocks.0")
    materialise(Linear(4, 4, device="meta"), "blocks.1")
    assert torch.equal(before, torch.get_rng_state())


def test_ranks_that_are_threads_do_not_disturb_each_other() -> None:
    alone = [values(materialise(torch_layers(), f"blocks.{index}")) for index in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda index: values(materialise(torch_layers(), f"blocks.{index}")), range(8)))
    assert all(same(left, right) for left, right in zip(alone, together, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_dtype_is_a_conversion_of_the_same_numbers(dtype: torch.dtype) -> None:
    wide, other = (materialise(torch_layers(), "b", dtype=wanted) for wanted in (None, dtype))
    for name, tensor in other.state_dict().items():
        expected = wide.state_dict()[name]
        assert torch.equal(tensor, expected.to(dtype) if expected.is_floating_point() else expected)
    declared = materialise(torch_layers().to(dtype), "b")
    assert same(values(other), values(declared))


def tied_layers(bias: bool) -> nn.Sequential:
    model = nn.Sequential(nn.Embedding(7, 4, device="meta"), nn.Linear(4, 7, bias=bias, device="meta"))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize("bias", [False, True])
def test_tied_parameters_stay_one_object_with_the_values_of_the_first_module(bias: bool) -> None:
    together, one_by_one = tied_layers(bias), tied_layers(bias)
    materialise(together, "")
    for name, block in one_by_one.named_children():
        materialise(block, name)
    alone = materialise(nn.Embedding(7, 4, device="meta"), "0")
    for model in (together, one_by_one):
        assert model[1].weight is model[0].weight
        assert torch.equal(model[0].weight, alone.weight)
        assert not any(parameter.is_meta for parameter in model.parameters())


def test_frozen_parameters_and_their_attributes_stay_as_they_are() -> None:
    layer = nn.Linear(2, 2, device="meta")
    layer.weight.requires_grad_(False)
    layer.weight.decay = False  # type: ignore[assignment]
    materialise(layer, "x")
    assert not layer.weight.requires_grad and layer.bias.requires_grad
    assert layer.weight.decay is False
    assert isinstance(layer.weight, nn.Parameter)


def test_real_tensors_are_left_alone() -> None:
    layer = nn.Linear(3, 3, device="meta")
    layer.bias = nn.Parameter(torch.full((3,), 7.0))
    block = nn.Sequential(layer, nn.Linear(2, 2))
    before = block[1].weight.clone()
    materialise(block, "x", dtype=torch.float64)
    assert torch.equal(block[0].bias, torch.full((3,), 7.0))
    assert torch.equal(block[1].weight, before)
    assert not block[0].weight.is_meta


def test_only_the_block_named_is_allocated() -> None:
    model = torch_layers()
    materialise(model[0], "0")
    assert not any(parameter.is_meta for parameter in model[0].parameters())
    assert all(parameter.is_meta for parameter in model[1:].parameters())


def test_a_copy_of_a_meta_block_has_the_same_values() -> None:
    block = torch_layers()
    clone = copy.deepcopy(block)
    assert same(values(materialise(block, "b")), values(materialise(clone, "b")))


def test_dropout_layers_get_their_names() -> None:
    block = nn.Sequential(Linear(2, 2, device="meta"), Dropout(0.5))
    materialise(block, "blocks.3")
    assert block[1].layer_name == "blocks.3.1"


def test_our_layers_are_filled_by_parameter_name() -> None:
    layer = materialise(Linear(300, 200, std=0.5, device="meta"), "blocks.2.mlp.up", seed=4)
    expected = torch.empty(200, 300)
    fill_normal(expected, 0.5, 4, "blocks.2.mlp.up.weight")
    assert torch.equal(layer.weight, expected)
    assert layer.weight.std().item() == pytest.approx(0.5, rel=0.02)
    assert layer.bias.abs().sum() == 0
    norms = materialise(nn.Sequential(LayerNorm(4, device="meta"), RMSNorm(4, device="meta")), "n")
    assert all(torch.equal(norm.weight, torch.ones(4)) for norm in norms)


def test_a_linear_layer_on_a_real_device_is_ready_to_use() -> None:
    layer = Linear(300, 200, std=0.5, device="cpu")
    assert layer.weight.std().item() == pytest.approx(0.5, rel=0.02)
    assert layer.bias.abs().sum() == 0


class Bare(nn.Module):
    """Owns a parameter and does not say how it starts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3, device="meta"))


class Noisy(Bare):
    """Starts from random operations of every spelling."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            drawn = torch.randn(3) + torch.rand_like(self.scale) + torch.normal(torch.zeros(3), 1.0)
            self.scale.copy_(drawn + torch.randint(5, (3,)) + torch.randint(2, 5, (3,)) + torch.randperm(3))


class Dropping(Bare):
    """Starts from a random operation that takes no generator."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scale.copy_(torch.native_dropout(torch.ones(3), 0.5, True)[0])


def test_random_operations_of_every_spelling_are_seeded_by_name() -> None:
    first, again, other = (materialise(Noisy(), name).scale for name in ("a", "a", "b"))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_module_that_cannot_be_initialised_is_refused_before_anything_is_allocated() -> None:
    block = nn.Sequential(nn.Linear(2, 2, device="meta"), Bare())
    with pytest.raises(ConfigError, match=r"blocks\.1\.1 \(Bare\) .* init_parameters"):
        materialise(block, "blocks.1")
    assert block[0].weight.is_meta


def test_a_random_operation_that_takes_no_generator_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"blocks\.1: .*native_dropout.*init_parameters"):
        materialise(Dropping(), "blocks.1")
