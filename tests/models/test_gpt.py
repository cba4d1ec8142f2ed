"""The GPT is its formulas, its chain is its forward pass, and its weights depend on names only."""

from __future__ import annotations

import copy
import hashlib
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipert.errors import BatchError
from pipert.layers import Dropout, materialise
from pipert.layers.rotary import rotate
from pipert.models import GPT, CausalLMLoss, GPTConfig
from pipert.randomness import Draw, drawing
from tests.models import reference

CASES = {"layers": 8, "hidden": 32, "heads": 4, "sequence": 16, "vocabulary": 61}


@st.composite
def configs(draw: st.DrawFn, **fixed: Any) -> GPTConfig:
    """Any combination of options, in a small shape."""
    kv_heads = draw(st.sampled_from([1, 2]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 3]))
    options = {
        "layers": draw(st.integers(1, 3)),
        "hidden": heads * draw(st.sampled_from([2, 6])),
        "heads": heads,
        "sequence": draw(st.integers(1, 7)),
        "vocabulary": draw(st.integers(1, 11)),
        "kv_heads": draw(st.sampled_from([None, kv_heads])),
        "mlp": draw(st.sampled_from([None, 5])),
        "positions": draw(st.sampled_from(["learned", "rotary"])),
        "norm": draw(st.sampled_from(["layernorm", "rmsnorm"])),
        "activation": draw(st.sampled_from(["gelu", "swiglu"])),
        "bias": draw(st.booleans()),
        "tied": draw(st.booleans()),
        "rotary_base": draw(st.sampled_from([10.0, 10_000.0])),
        "init_std": 0.3,
    }
    return GPTConfig(**{**options, **fixed})


def randomised(config: GPTConfig) -> GPT:
    """A model in float64 whose norms and biases are not at their initial ones and zeros."""
    model = GPT(config, device="cpu", dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


@settings(max_examples=60)
@given(config=configs(), data=st.data())
def test_loss_and_every_gradient_equal_an_independent_reference(config: GPTConfig, data: st.DataObject) -> None:
    model = randomised(config)
    positions = data.draw(st.integers(1, config.sequence))
    generator = torch.Generator().manual_seed(positions)
    ids, targets = torch.randint(config.vocabulary, (2, 2, positions), generator=generator)
    targets[0, -1] = -100
    weights = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}

    loss = CausalLMLoss()(model(ids), targets)
    expected = reference.loss(reference.logits(config, weights, ids), targets)

    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    loss.backward()
    expected.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-10, atol=1e-10, msg=name)


@given(config=configs(dropout=0.5))
def test_the_chain_of_blocks_is_the_forward_pass(config: GPTConfig) -> None:
    model = GPT(config, device="cpu")
    ids = torch.arange(2 * config.sequence).view(2, -1) % config.vocabulary
    names = ["embedding", *(f"blocks.{index}" for index in range(config.layers)), "norm", "head"]
    assert [name for name, _ in model.blocks()] == names
    with drawing(Draw(0, 0, (0, 1))):
        whole = model(ids)
        x: Any = ids
        for name, block in model.blocks():
            assert model.get_submodule(name) is block
            x = block(x)
    assert torch.equal(whole, x)
    owned = {f"{name}.{key}" for name, block in model.blocks() for key, _ in block.named_parameters()}
    assert owned == {name for name, _ in model.named_parameters(remove_duplicate=False)}


@given(config=configs())
def test_the_parameter_formula_is_exact(config: GPTConfig) -> None:
    assert sum(parameter.numel() for parameter in GPT(config).parameters()) == config.parameters


@given(config=configs(dropout=0.25), layout=st.lists(st.integers(0, 6), max_size=3), seed=st.integers(0, 2**40))
def test_weights_are_the_same_whichever_rank_makes_them(config: GPTConfig, layout: list[int], seed: int) -> None:
    whole = GPT(config, device="cpu", seed=seed)
    meta = GPT(config)
    blocks = meta.blocks()
    cuts = [0, *sorted(min(cut, len(blocks)) for cut in layout), len(blocks)]
    for start, end in itertools.pairwise(cuts):
        rank = copy.deepcopy(meta)  # each rank has a copy of the meta model, and only its own blocks are real
        for name, block in rank.blocks()[start:end]:
            materialise(block, name, seed=seed)
            expected = whole.get_submodule(name)
            assert hashes(block) == hashes(expected)
            assert dropout_names(block) == dropout_names(expected)
        if config.tied and start == 0 and end == len(blocks):
            assert rank.head.weight is rank.embedding.weight
        for name, block in rank.blocks()[:start] + rank.blocks()[end:]:
            shared = {"weight"} if config.tied and name in ("embedding", "head") else set()
            assert all(value.is_meta for key, value in block.named_parameters() if key not in shared)


def dropout_names(module: nn.Module) -> dict[str, str | None]:
    return {path: layer.layer_name for path, layer in module.named_modules() if isinstance(layer, Dropout)}


def hashes(module: nn.Module) -> dict[str, str]:
    return {key: hashlib.sha256(value.numpy().tobytes()).hexdigest() for key, value in module.state_dict().items()}


def test_blocks_0_and_4_differ_and_biases_and_norms_start_as_usual() -> None:
    model = GPT(GPTConfig(**CASES), device="cpu")
    first, fifth = (hashes(model.get_submodule(f"blocks.{index}")) for index in (0, 4))
    for name in first:
        matrix = name.endswith("weight") and "norm" not in name
        assert (first[name] != fifth[name]) is matrix, name
    assert model.get_parameter("blocks.3.mlp.down.bias").abs().sum() == 0
    assert torch.equal(model.get_parameter("norm.weight"), torch.ones(32))


def test_initial_spreads_are_gpt_2s_and_the_loss_starts_at_the_uniform_one() -> None:
    config = GPTConfig(layers=8, hidden=128, heads=4, sequence=64, vocabulary=256)
    model = GPT(config, device="cpu")
    assert model.get_parameter("blocks.1.mlp.up.weight").std().item() == pytest.approx(0.02, rel=0.02)
    assert model.get_parameter("blocks.1.mlp.down.weight").std().item() == pytest.approx(0.02 / 4, rel=0.02)
    assert model.get_parameter("blocks.1.attention.out.weight").std().item() == pytest.approx(0.02 / 4, rel=0.02)
    ids = torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(0))
    loss = CausalLMLoss()(model(ids[:, :-1]), ids[:, 1:])
    assert loss.item() == pytest.approx(torch.tensor(256.0).log().item(), abs=0.1)


def test_another_dtype_starts_from_the_same_numbers() -> None:
    config = GPTConfig(**CASES)
    single, double, half = (GPT(config, "cpu", dtype=dtype) for dtype in (None, torch.float64, torch.bfloat16))
    for one, two, three in zip(single.parameters(), double.parameters(), half.parameters(), strict=True):
        assert one.dtype == torch.float32 and two.dtype == torch.float64 and three.dtype == torch.bfloat16
        assert torch.equal(one.double(), two)
        assert torch.equal(one.bfloat16(), three)


def test_a_token_never_sees_the_future() -> None:
    model = randomised(GPTConfig(**{**CASES, "layers": 2}, positions="rotary"))
    ids = torch.randint(61, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[0, 9:] = (changed[0, 9:] + 1) % 61
    assert torch.equal(model(ids)[:, :9], model(changed)[:, :9])
    assert not torch.equal(model(ids)[:, 9:], model(changed)[:, 9:])


def test_rotary_positions_see_only_distances() -> None:
    q, k = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q_TD, k_TD = (rotate(x.expand(1, 1, 50, 8), 10_000.0)[0, 0] for x in (q, k))
    scores = q_TD @ k_TD.T
    assert scores[0, 0].item() == pytest.approx((q @ k).item())
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1], rtol=1e-10, atol=1e-10)
    assert not torch.allclose(scores[0, 1:], scores[0, :1])


def test_dropout_is_the_same_for_any_split_of_the_batch() -> None:
    model = GPT(GPTConfig(**{**CASES, "layers": 2}, dropout=0.5), "cpu", dtype=torch.float64)
    ids = torch.randint(61, (6, 16), generator=torch.Generator().manual_seed(0))
    with drawing(Draw(0, 3, tuple(range(6)))):
        whole = model(ids)
    parts = []
    for start, end in ((0, 1), (1, 4), (4, 6)):
        with drawing(Draw(0, 3, tuple(range(start, end)))):
            parts.append(model(ids[start:end]))
    torch.testing.assert_close(whole, torch.cat(parts), rtol=1e-12, atol=1e-12)
    with drawing(Draw(0, 4, tuple(range(6)))):
        assert not torch.allclose(whole, model(ids))
    with drawing(Draw(0, 3, tuple(range(6)))):
        assert torch.allclose(model.eval()(ids), model(ids))


def test_training_in_one_process_learns() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**CASES, "layers": 2}), device="cpu")
    ids = torch.randint(61, (4, 17))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = CausalLMLoss()(model(ids[:, :-1]), ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


def test_a_state_dict_goes_round_and_names_are_paths() -> None:
    one, two = (GPT(GPTConfig(**CASES), "cpu", seed=seed) for seed in (1, 2))
    two.load_state_dict(one.state_dict())
    assert hashes(one) == hashes(two)
    assert "blocks.7.attention.qkv.weight" in one.state_dict()
    assert two.head.weight is two.embedding.weight


def test_a_sequence_that_is_too_long_is_refused() -> None:
    model = GPT(GPTConfig(**CASES), "cpu")
    with pytest.raises(BatchError, match=r"17 tokens is longer than the model's 16"):
        model(torch.zeros(1, 17, dtype=torch.int64))
