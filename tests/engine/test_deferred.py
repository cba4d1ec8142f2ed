"""What is put off is computed later, to the same bits."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pipert.engine.deferred import Deferred, Products, deferring
from pipert.engine.parts import Ready
from pipert.layers import Linear

Gradients = dict[str, torch.Tensor | None]


def whole(function: Callable[..., torch.Tensor], tensors: dict[str, torch.Tensor], seed: int = 1) -> Gradients:
    """Output and gradients of a plain backward."""
    leaves = {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in tensors.items()}
    output = function(**leaves)
    torch.autograd.backward(output, gradient_for(output, seed))
    return {"output": output.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def halves(function: Callable[..., torch.Tensor], tensors: dict[str, torch.Tensor], seed: int = 1) -> Gradients:
    """The same in two halves."""
    leaves = {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in tensors.items()}
    deferred = Deferred()
    with deferring(deferred):
        output = function(**leaves)
    deferred.first_half([output], [gradient_for(output, seed)])
    deferred.accumulate()
    return {"output": output.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def gradient_for(output: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(output.shape, generator=generator, dtype=output.dtype)


def assert_equal(mine: Gradients, wanted: Gradients) -> None:
    for name, tensor in wanted.items():
        got = mine[name]
        assert (got is None) == (tensor is None), name
        assert tensor is None or (got is not None and got.dtype == tensor.dtype and torch.equal(got, tensor)), name


def tensors(shape: tuple[int, ...], outputs: int, dtype: torch.dtype, bias: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"x": shape, "weight": (outputs, shape[-1]), **({"bias": (outputs,)} if bias else {})}
    made = {name: torch.randn(size, generator=generator).to(dtype) for name, size in sizes.items()}
    return {name: tensor.requires_grad_() for name, tensor in made.items()}


MEMORY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x * 1,
    "transposed": lambda x: (x * 1).transpose(0, -2) if x.dim() > 2 else (x * 1).t().contiguous().t(),
    "every other": lambda x: torch.stack([x, x], -1)[..., 0],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_of_any_shape_has_the_same_bits(dtype: torch.dtype, memory: str, bias: bool) -> None:
    shapes = [(1, 1), (5, 1), (1, 7), (33, 7), (3, 5, 7), (1, 1, 7), (3, 1, 1), (2, 3, 5, 8), (16, 64, 32)]
    for shape, outputs, learns in product(shapes, (1, 5, 64), (True, False)):
        given = tensors(shape, outputs, dtype, bias)
        given["x"].requires_grad_(learns)

        def layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            return F.linear(MEMORY[memory](x), weight, bias).add_(1).relu_()

        if learns or memory == "contiguous":
            assert_equal(halves(layer, given), whole(layer, given))


def test_a_linear_layers_gradients_wait_for_the_second_half() -> None:
    given = tensors((4, 6), 6, torch.float32, True)
    deferred = Deferred()
    with deferring(deferred):
        output = F.linear(given["x"], given["weight"], given["bias"])
    deferred.first_half([output], [torch.ones_like(output)])
    assert [name for name, tensor in given.items() if tensor.grad is not None] == ["x"]
    deferred.accumulate()
    assert all(tensor.grad is not None for tensor in given.values())


def expanded(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight, bias).sum(0)


def twice(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.linear(torch.tanh(F.linear(x, weight, bias)), weight=weight) + x


def three_times(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    first, second = F.linear(x, weight, bias), F.linear(x * 2, weight, bias)
    return F.linear(first * second, weight)


def tied(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(F.embedding(torch.tensor([1, 0, 3, 1]), weight) + x, weight)


def also_raw(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x @ weight, weight)


def in_place_later(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    y = F.linear(x.view(2, 2, -1), weight, bias)
    y[0] *= 2
    return F.gelu(y)


def bias_of_another_shape(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight, bias[:1])


@pytest.mark.parametrize(
    "function", [expanded, twice, three_times, tied, also_raw, in_place_later, bias_of_another_shape]
)
def test_a_weight_used_in_several_ways_has_the_same_bits(function: Callable[..., torch.Tensor]) -> None:
    given = tensors((4, 6), 6, torch.float32, function not in (tied, also_raw))
    if function is bias_of_another_shape:
        given["weight"] = given["weight"][:4].detach().requires_grad_()
    assert_equal(halves(function, given), whole(function, given))


@pytest.mark.parametrize("frozen", ["weight", "bias", "x"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    given = tensors((4, 6), 6, torch.float32, True)
    given[frozen].requires_grad_(False)
    mine = halves(also_biased, given)
    assert mine[frozen] is None
    assert_equal(mine, whole(also_biased, given))


def also_biased(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight, bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_autocast_computes_the_products_in_its_own_type(dtype: torch.dtype, recompute: bool) -> None:
    def layers(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype):
            y = (
                checkpoint(also_biased, x, weight, bias, use_reentrant=False)
                if recompute
                else also_biased(x, weight, bias)
            )
            return y.tanh().float()

    given = tensors((3, 5, 7), 4, torch.float32, True)
    assert_equal(halves(layers, given), whole(layers, given))


def test_double_precision_stays_what_it_is_under_autocast() -> None:
    def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, weight)

    given = tensors((3, 5), 4, torch.float64, False)
    wanted = whole(layer, given)
    assert wanted["output"] is not None and wanted["output"].dtype is torch.float64
    deferred = Deferred()
    with deferring(deferred):
        assert layer(**given).dtype is torch.float64


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_models_own_checkpoints_run_again_in_the_first_half(reentrant: bool) -> None:
    def layers(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.linear(checkpoint(twice, x, weight, bias, use_reentrant=reentrant), weight)

    given = tensors((4, 6), 6, torch.float64, True)
    mine, wanted = halves(layers, given), whole(layers, given)
    for name in given:
        torch.testing.assert_close(mine[name], wanted[name], rtol=1e-12, atol=1e-12)


def test_a_gradient_within_the_forward_can_be_differentiated() -> None:
    def force(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        place = x * 1
        energy = torch.tanh(F.linear(place, weight, bias)).sum()
        (slope,) = torch.autograd.grad(energy, place, create_graph=True)
        return slope**2 + F.linear(slope, weight)

    given = tensors((4, 6), 6, torch.float64, True)
    mine, wanted = halves(force, given), whole(force, given)
    for name in given:
        torch.testing.assert_close(mine[name], wanted[name], rtol=1e-12, atol=1e-12)


def test_hooks_on_a_parameter_see_each_gradient_once() -> None:
    given = tensors((4, 6), 6, torch.float32, True)
    seen: list[torch.Tensor] = []

    def double(gradient: torch.Tensor) -> torch.Tensor:
        seen.append(gradient)
        return gradient * 2

    given["weight"].register_hook(double)
    run_in_halves(tied_and_biased, given)
    wanted = whole(tied_and_biased, given)["weight"]
    assert len(seen) == 1
    assert wanted is not None and given["weight"].grad is not None
    assert torch.equal(given["weight"].grad, 2 * wanted)


def test_hooks_after_an_accumulation_run_once() -> None:
    given = tensors((4, 6), 6, torch.float32, True)
    order: list[bool] = []
    given["weight"].register_post_accumulate_grad_hook(lambda parameter: order.append(parameter.grad is not None))
    run_in_halves(also_biased, given)
    assert order == [True]


def run_in_halves(function: Callable[..., torch.Tensor], leaves: dict[str, torch.Tensor]) -> None:
    deferred = Deferred()
    with deferring(deferred):
        output = function(**leaves)
    deferred.first_half([output], [gradient_for(output, 1)])
    deferred.accumulate()


def tied_and_biased(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.linear(F.embedding(torch.tensor([1, 0, 3, 1]), weight) + x, weight, bias)


def test_gradients_that_were_there_are_added_to_and_never_seen_by_the_first_half() -> None:
    given = tensors((4, 6), 6, torch.float32, False)
    for tensor in given.values():
        tensor.grad = torch.ones_like(tensor)
    deferred = Deferred()
    with deferring(deferred):
        output = tied(**given)
    deferred.first_half([output], [gradient_for(output, 1)])
    weight = given["weight"]
    assert weight.grad is not None and torch.equal(weight.grad, torch.ones_like(weight))
    deferred.accumulate()
    wanted = whole(tied, given)["weight"]
    assert wanted is not None and torch.equal(weight.grad, 1 + wanted)


def test_between_the_halves_only_inputs_and_output_gradients_of_linear_layers_are_kept() -> None:
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    refs: dict[str, StorageWeakRef] = {}

    def note(name: str, tensor: torch.Tensor) -> torch.Tensor:
        refs[name] = StorageWeakRef(tensor.untyped_storage())
        return tensor

    def run(x: torch.Tensor) -> torch.Tensor:
        inner = note("inner", first(note("x", x * 1)))
        squashed = note("squashed", torch.tanh(inner))
        return second(note("scaled", squashed * 2)).relu()

    deferred = Deferred()
    with deferring(deferred):
        output = run(torch.randn(3, 6, requires_grad=True))
    deferred.first_half([output], [torch.ones_like(output)])
    del output
    gc.collect()
    assert {name: not ref.expired() for name, ref in refs.items()} == {
        "x": True,
        "inner": False,
        "squashed": False,
        "scaled": True,
    }
    deferred.accumulate()
    gc.collect()
    assert all(ref.expired() for ref in refs.values())


def test_modules_that_are_not_linear_are_left_to_autograd() -> None:
    torch.manual_seed(0)
    zoo: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
        "convolution": (nn.Conv1d(3, 3, 3, padding=1), (2, 3, 8)),
        "layer norm": (nn.LayerNorm(6), (4, 6)),
        "batch norm": (nn.BatchNorm1d(6), (4, 6)),
        "one slope": (nn.PReLU(), (4, 6)),
        "attention": (nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0), (4, 2, 6)),
        "recurrent": (nn.GRUCell(6, 6), (4, 6)),
        "weight norm": (nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), (4, 6)),
    }
    for name, (module, shape) in zoo.items():
        x, found = torch.randn(shape, requires_grad=True), []
        for split in (False, True):
            module.zero_grad()
            x.grad = None
            deferred = Deferred() if split else None
            with deferring(deferred):
                output = module(x)
            if deferred is None:
                torch.autograd.backward(output.square().sum())
            else:
                deferred.first_half([output.square().sum()], [torch.ones(())])
                deferred.accumulate()
            found.append([x.grad, *(parameter.grad for parameter in module.parameters())])
        for mine, wanted in zip(*found, strict=True):
            assert torch.equal(mine, wanted), name


class Marked(torch.Tensor):
    """A subclass has rules of its own."""


def test_other_kinds_of_tensors_are_left_alone() -> None:
    given: dict[str, Any] = tensors((4, 6), 6, torch.float32, False)
    deferred = Deferred()
    with deferring(deferred):
        output = F.linear(given["x"].as_subclass(Marked), given["weight"])
        assert type(output) is Marked
        torch.autograd.backward(output.sum())
    assert given["weight"].grad is not None


class Multiplies(nn.Module):
    """A layer of the user's own that takes part in the split."""

    multiply = staticmethod(F.linear)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x, self.weight).tanh()


class Calls(nn.Module):
    """A layer that calls ``F.linear`` from its second run on, or from the first."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.weight, self.late = nn.Parameter(torch.randn(6, 6)), late

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        late, self.late = self.late, False
        return x @ self.weight.t() if late else F.linear(x, self.weight)


def in_two_halves(module: nn.Module, products: Products, x: torch.Tensor) -> list[torch.Tensor | None]:
    """Gradients after the first half, which leaves the module as it was."""
    module.zero_grad()
    deferred = Deferred()
    before = {layer: set(vars(layer)) for layer in module.modules()}
    with deferring(deferred, products):
        output = module(x)
    assert {layer: set(vars(layer)) for layer in before} == before
    deferred.first_half([output], [torch.ones_like(output)])
    found = [parameter.grad for parameter in module.parameters()]
    deferred.accumulate()
    mine = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    torch.autograd.backward(module(x).sum())
    for got, parameter in zip(mine, module.parameters(), strict=True):
        assert (got is None) == (parameter.grad is None)
        assert got is None or torch.allclose(got, parameter.grad)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(6, 6), lambda: Linear(6, 6), Multiplies], ids=["torch", "own", "user"]
)
def test_layers_whose_products_are_known_need_no_look_at_every_function(make: Callable[[], nn.Module]) -> None:
    block = nn.Sequential(make(), nn.Tanh(), make())
    products = Products(block)
    x = torch.randn(2, 3, 6, requires_grad=True)
    for _ in range(3):
        assert in_two_halves(block, products, x) == [None] * len(list(block.parameters()))
        assert products.others is False


def test_a_product_of_another_kind_is_found_when_the_block_runs_first() -> None:
    block = nn.Sequential(nn.Linear(6, 6), Calls(late=False))
    products = Products(block)
    for _ in range(2):
        assert in_two_halves(block, products, torch.randn(4, 6, requires_grad=True)) == [None] * 3
        assert products.others is True


def test_a_product_that_only_turns_up_later_is_computed_at_once() -> None:
    block = nn.Sequential(nn.Linear(6, 6), Calls(late=True))
    products = Products(block)
    x = torch.randn(4, 6, requires_grad=True)
    for _ in range(2):
        *first, late = in_two_halves(block, products, x)
        assert first == [None, None] and late is not None
        block[1].late = products.others is None


def test_a_layer_with_a_forward_of_its_own_keeps_it() -> None:
    layer = nn.Linear(6, 6)
    layer.forward = lambda x: F.linear(x * 2, layer.weight)  # type: ignore[method-assign]
    products = Products(layer)
    assert in_two_halves(layer, products, torch.randn(4, 6, requires_grad=True)) == [None, None]
    assert products.others is True


def test_a_first_gradient_is_taken_and_later_ones_are_added_in_place() -> None:
    given = tensors((4, 6), 6, torch.float32, False)
    weight, pointers = given["weight"], list[int]()
    for _ in range(2):
        deferred = Deferred()
        with deferring(deferred):
            output = F.linear(given["x"], weight)
        deferred.first_half([output], [gradient_for(output, 1)])
        (parts,) = deferred._parts.values()
        ready = parts[0].compute()
        parts[:] = [Ready(ready)]
        deferred.accumulate()
        assert weight.grad is not None
        pointers += [ready.data_ptr(), weight.grad.data_ptr()]
    first, taken, second, after = pointers
    assert first == taken == after != second


def test_function_transformations_run_as_without_a_split() -> None:
    given = tensors((4, 6), 6, torch.float32, False)

    def mapped(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: F.linear(row[None], weight)[0])(x)

    mine, wanted = halves(mapped, given), whole(mapped, given)
    for name in given:
        torch.testing.assert_close(mine[name], wanted[name], rtol=1e-6, atol=1e-6)
