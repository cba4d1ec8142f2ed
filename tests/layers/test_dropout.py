"""Dropout masks belong to (seed, layer, step, sample): the layout cannot change them."""

from __future__ import annotations

import itertools
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pipert.errors import BatchError, ConfigError
from pipert.hipkernels.reference.dropout import philox
from pipert.layers import Dropout, Part, name_layers
from pipert.randomness import Draw, drawing

SHAPE = (8, 64, 32)


def masks(layer: Dropout, samples: tuple[int, ...], *, seed: int = 0, step: int = 0) -> torch.Tensor:
    """What the layer lets through of ones, per sample."""
    with drawing(Draw(seed, step, samples)):
        out = layer(torch.ones(len(samples), *SHAPE[1:]))
    kept = out != 0
    assert torch.allclose(out[kept], torch.tensor(1.0 / (1.0 - layer.p)))
    return kept


def agreement(left: torch.Tensor, right: torch.Tensor) -> float:
    return (left == right).float().mean().item()


@given(cuts=st.lists(st.integers(0, 8), max_size=4), p=st.sampled_from([0.1, 0.5, 0.9]))
def test_masks_do_not_depend_on_how_the_batch_is_split(cuts: list[int], p: float) -> None:
    layer = Dropout(p, "blocks.0.mlp_dropout")
    whole = masks(layer, tuple(range(8)))
    edges = [0, *sorted(cuts), 8]
    parts = [masks(layer, tuple(range(a, b))) for a, b in itertools.pairwise(edges) if a < b]
    assert torch.equal(whole, torch.cat(parts))
    assert whole.float().mean().item() == pytest.approx(1 - p, abs=0.02)


def test_masks_of_replicas_micro_batches_steps_layers_and_seeds_are_independent() -> None:
    layer = Dropout(0.5, "blocks.0.mlp_dropout")
    first = masks(layer, (0, 1, 2, 3))
    others = [
        masks(layer, (4, 5, 6, 7)),  # another replica or micro-batch
        masks(layer, (0, 1, 2, 3), step=1),
        masks(layer, (0, 1, 2, 3), seed=1),
        masks(Dropout(0.5, "blocks.4.mlp_dropout"), (0, 1, 2, 3)),  # another stage
        masks(Dropout(0.5, "blocks.0.attention_dropout"), (0, 1, 2, 3)),
    ]
    for other in others:
        assert agreement(first, other) == pytest.approx(0.5, abs=0.05)
    for left in range(4):
        for right in range(left):
            assert agreement(first[left], first[right]) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_masks_do_not_depend_on_the_dtype(dtype: torch.dtype) -> None:
    layer = Dropout(0.5, "d")
    with drawing(Draw(0, 0, (0, 1))):
        out = layer(torch.ones(2, 64, dtype=dtype))
    assert out.dtype == dtype
    with drawing(Draw(0, 0, (0, 1))):
        assert torch.equal(out.double(), layer(torch.ones(2, 64)).double())


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_are_bitwise_equal_when_the_forward_pass_is_recomputed(reentrant: bool) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(16, 16), Dropout(0.5), nn.Linear(16, 16), Dropout(0.3))
    name_layers(block, "blocks.0")
    x = torch.randn(4, 16, requires_grad=True)

    def gradients(recompute: bool) -> list[torch.Tensor]:
        block.zero_grad()
        with drawing(Draw(3, 5, (4, 5, 6, 7))):
            out = checkpoint(block, x, use_reentrant=reentrant, preserve_rng_state=False) if recompute else block(x)
            out.square().sum().backward()
        return [parameter.grad.clone() for parameter in block.parameters()]

    for plain, again in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(plain, again)


def test_dropped_elements_get_no_gradient_and_kept_ones_are_scaled() -> None:
    x = torch.ones(2, 100, dtype=torch.float64, requires_grad=True)
    with drawing(Draw(0, 0, (0, 1))):
        out = Dropout(0.75, "d")(x)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())
    assert set(out.unique().tolist()) == {0.0, 4.0}


def test_outside_of_a_draw_it_is_torchs_dropout() -> None:
    x = torch.randn(4, 50)
    torch.manual_seed(1)
    ours = Dropout(0.3)(x)
    torch.manual_seed(1)
    assert torch.equal(ours, F.dropout(x, 0.3))


def test_a_draw_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    masks(Dropout(0.5, "d"), (0, 1))
    assert torch.equal(before, torch.get_rng_state())


def test_evaluation_and_probability_zero_change_nothing() -> None:
    x = torch.randn(3, 5)
    with drawing(Draw(0, 0, (0, 1, 2))):
        assert Dropout(0.5, "d").eval()(x) is x
        assert Dropout(0.0)(x) is x
        assert Dropout(1.0, "d")(x).abs().sum() == 0


def test_layers_are_named_by_their_path_in_the_model() -> None:
    block = nn.ModuleDict({"a": Dropout(), "b": nn.Sequential(nn.Linear(1, 1), Dropout())})
    name_layers(block, "blocks.7")
    assert block["a"].layer_name == "blocks.7.a"
    assert block["b"][1].layer_name == "blocks.7.b.1"
    assert "blocks.7.b.1" in repr(block)


def test_a_layer_without_a_name_refuses_to_draw() -> None:
    with drawing(Draw(0, 0, (0,))), pytest.raises(ConfigError, match="name_layers"):
        Dropout(0.5)(torch.ones(1, 2))


@pytest.mark.parametrize("shape", [(), (3, 2)])
def test_rows_that_are_not_the_samples_are_refused(shape: tuple[int, ...]) -> None:
    with drawing(Draw(0, 0, (0, 1))), pytest.raises(BatchError, match=r"dropout d: .* 2 samples.*dimension 0"):
        Dropout(0.5, "d")(torch.ones(shape))


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
def test_a_probability_outside_of_0_and_1_is_refused(p: float) -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        Dropout(p)


@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    dim=st.integers(1, 3),
    parts=st.integers(1, 4),
)
def test_the_parts_of_a_sample_have_the_parts_of_its_mask(shape: list[int], dim: int, parts: int) -> None:
    dim = min(dim, len(shape))
    whole = torch.ones(2, *[size * (parts if i == dim - 1 else 1) for i, size in enumerate(shape)])
    with drawing(Draw(0, 0, (3, 5))):
        expected = Dropout(0.5, "d")(whole)
        pieces = [Dropout(0.5, "d", Part(dim, i, parts))(whole.chunk(parts, dim)[i]) for i in range(parts)]
    assert torch.equal(torch.cat(pieces, dim), expected)


@pytest.mark.parametrize("dim", [1, 2])
def test_parts_differ_from_each_other_and_replicated_regions_agree(dim: int) -> None:
    x = torch.ones(1, 64, 64)
    with drawing(Draw(0, 0, (0,))):
        masks_of = [Dropout(0.5, "d", Part(dim, i, 2))(x) != 0 for i in range(2)]
        assert torch.equal(Dropout(0.5, "d")(x), Dropout(0.5, "d")(x))
    assert agreement(*masks_of) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("wrong", [(0, 0, 2), (1, 2, 2), (1, -1, 2)])
def test_a_part_that_is_not_there_is_refused(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="index < parts"):
        Part(*wrong)


def test_a_part_of_a_dimension_that_the_input_does_not_have_is_refused() -> None:
    with drawing(Draw(0, 0, (0,))), pytest.raises(BatchError, match="no dimension"):
        Dropout(0.5, "d", Part(2, 0, 2))(torch.ones(1, 4))


PARTS = [None, Part(1, 1, 2), Part(2, 1, 3)]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_masks_are_philoxs_with_and_without_kernels(
    part: Part | None, p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x, draw = Dropout(p, "d", part), torch.randn(3, 5, 7), Draw(1, 2, (4, 8, 15))
    results = []
    for mode in ("required", "reference"):
        monkeypatch.setenv("PIPERT_KERNELS", mode)
        with drawing(draw):
            results.append(layer(x))
    assert torch.equal(*results)
    whole = [size * (part.parts if part is not None and part.dim == dim else 1) for dim, size in enumerate(x.shape)]
    words = philox(layer.keys(draw, x)[:, None], torch.arange(prod(whole[1:]) // 4 + 1)).reshape(3, -1)
    mask = (words[:, : prod(whole[1:])] >= round(p * 2**32)).reshape(whole)
    if part is not None:
        mask = mask.chunk(part.parts, part.dim)[part.index]
    assert torch.equal(results[0] != 0, mask)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("part", PARTS)
def test_masks_are_the_same_on_a_gpu(part: Part | None) -> None:
    layer, x = Dropout(0.3, "d", part), torch.randn(3, 5, 7)
    with drawing(Draw(1, 2, (4, 8, 15))):
        assert torch.equal(layer(x) != 0, layer(x.cuda()).cpu() != 0)


def test_empty_samples_are_fine() -> None:
    with drawing(Draw(0, 0, ())):
        assert Dropout(0.5, "d")(torch.ones(0, 4)).shape == (0, 4)
    with drawing(Draw(0, 0, (0,))):
        assert Dropout(0.5, "d", Part(1, 1, 2))(torch.ones(1, 0, 3)).shape == (1, 0, 3)
