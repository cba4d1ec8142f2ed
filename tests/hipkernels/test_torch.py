"""The operators are good citizens of torch: fake kernels, ``torch.compile``, meta tensors, its own checks."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable

import pytest
import torch
from torch.autograd import forward_ad

import pipert.hipkernels as hk
from pipert.hipkernels import ops
from pipert.hipkernels.errors import KernelInputError
from pipert.hipkernels.runtime import Library, use
from tests.hipkernels.check import DTYPES, assert_close, leaf, randn


def keys() -> torch.Tensor:
    return torch.tensor([3, 5])


def angles() -> torch.Tensor:
    return torch.outer(torch.arange(3).float(), torch.tensor([1.0, 0.1]))


def example() -> torch.Tensor:
    return leaf(randn(2, 3, 8))


def cases() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Every operation with a gradient, as a function of one tensor of shape (2, 3, 8)."""
    weight, bias = randn(8), randn(8, seed=1)
    targets = torch.tensor([[0, 1, 7], [-100, 3, 4]])
    return {
        "layer_norm": lambda x: hk.layer_norm(x, weight, bias),
        "add_rms_norm": lambda x: sum(hk.add_rms_norm(x, x * 2, weight)),
        "bias_gelu": lambda x: hk.bias_gelu(x, bias),
        "swiglu": hk.swiglu,
        "bias_dropout_add": lambda x: hk.bias_dropout_add(x, bias, x, p=0.5, keys=keys()),
        "rotary": lambda x: hk.rotary(x, angles().cos(), angles().sin()),
        "masked_softmax": lambda x: hk.masked_softmax(x, causal=True),
        "cross_entropy": lambda x: hk.cross_entropy(x, targets, smoothing=0.1),
    }


@pytest.fixture(params=cases())
def operation(request: pytest.FixtureRequest) -> Callable[[torch.Tensor], torch.Tensor]:
    return cases()[request.param]


def test_kernels_equal_the_reference(
    library: Library, operation: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = example()
    y = operation(x)
    y.sum().backward()
    twin = leaf(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipert.hipkernels.runtime.DTYPES", {})  # no dtype is a kernel's: everything is the reference's
        y_twin = operation(twin)
        y_twin.sum().backward()
    assert_close(y, y_twin, 8.0)
    assert_close(x.grad, twin.grad, 8.0)


def test_meta_tensors_have_the_shapes_of_results(operation: Callable[[torch.Tensor], torch.Tensor]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = operation(example())
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = operation(torch.empty(2, 3, 8))
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


def test_gradients_flow_through_compiled_graphs(
    host: Library, operation: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Traced by dynamo with forward and backward, without breaks; not lowered by inductor, which takes long."""
    with use(host):
        compiled = torch.compile(operation, backend="aot_eager", fullgraph=True)
        x, twin = example(), example()
        compiled(x).sum().backward()
        operation(twin).sum().backward()
        assert_close(x.grad, twin.grad)


def test_torchs_own_checks_of_operators_pass(host: Library) -> None:
    x, weight = example(), leaf(randn(8))
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    with use(host):
        for module in pkgutil.iter_modules(ops.__path__):
            importlib.import_module(f"{ops.__name__}.{module.name}")
        operators = torch.ops.pipert
        for operator, arguments in (
            (operators.norm_forward, (x, None, weight, None, 1e-5, True)),
            (operators.gelu, (x, weight, True)),
            (operators.swiglu, (x,)),
            (operators.dropout, (x, weight, x.detach().clone(), keys(), 0.5, 4)),
            (operators.rotary, (x, angles().cos(), angles().sin(), False, 1)),
            (operators.softmax, (x, None, 1.0, True)),
            (operators.scale_cast_, (torch.empty(4), torch.ones(4), None, 2.0, torch.zeros(1))),
            (operators.squared_norm, ([torch.ones(4), torch.ones(3)],)),
        ):
            torch.library.opcheck(operator, arguments, test_utils=checks)


def test_tensors_that_a_kernel_cannot_take_never_reach_it(host: Library) -> None:
    with pytest.raises(KernelInputError, match="contiguous"):
        host.run("swiglu_forward", torch.empty(2, 4), torch.empty(8, 2).t(), 2, 4, 0)
    with pytest.raises(KernelInputError, match="meta"):
        host.run("swiglu_forward", torch.empty(2, 4), torch.empty(2, 8, device="meta"), 2, 4, 0)


def test_tensors_without_memory_of_their_own_never_reach_a_kernel(host: Library) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    freed, freed_vector = torch.ones(2, 8), torch.ones(8)
    for tensor in (freed, freed_vector):
        tensor.untyped_storage().resize_(0)
    with use(host):
        y = hk.bias_gelu(example())
        for call in (
            lambda: hk.layer_norm(freed),
            lambda: hk.layer_norm(torch.ones(2, 8), freed_vector),
            lambda: hk.squared_norm([torch.ones(3), freed]),
            lambda: hk.bias_gelu(torch.ones(2, 8), out=freed),
            lambda: hk.bias_gelu(torch._neg_view(torch.ones(2, 8))),
            lambda: y.backward(torch._efficientzerotensor(y.shape)),
        ):
            with pytest.raises(KernelInputError, match=r"no memory|negative view"):
                call()
        assert hk.squared_norm([FakeTensorMode().from_tensor(torch.ones(3))]).shape == ()


def test_inputs_that_are_no_real_numbers_are_refused(operation: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for dtype in (torch.int64, torch.bool, torch.complex64):
        with pytest.raises(KernelInputError, match="floating point"):
            operation(torch.ones(2, 3, 8, dtype=dtype))


def test_derivatives_that_kernels_do_not_have_are_refused_rather_than_zero(
    host: Library, operation: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    x = example().detach()
    with use(host):
        for call in (
            lambda: torch.func.jvp(operation, (x,), (torch.ones_like(x),)),
            lambda: torch.func.grad(lambda a: operation(a).sum())(x),
        ):
            with pytest.raises(KernelInputError, match=r"torch\.func"):
                call()
        with forward_ad.dual_level():
            operation(x)
            with pytest.raises(KernelInputError, match="forward mode"):
                operation(forward_ad.make_dual(x, torch.ones_like(x)))


def test_autograd_notices_what_a_kernel_overwrites(host: Library) -> None:
    def refused(saved: torch.Tensor, write: Callable[[torch.Tensor], object]) -> None:
        result = leaf(torch.ones(4, 8)) * saved
        write(saved)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()

    rest = [torch.ones(4, 8) for _ in range(3)]
    with use(host):
        refused(torch.ones(4, 8), lambda t: hk.layer_norm(rest[0], out=t))
        refused(torch.ones(4, 8), lambda t: hk.masked_softmax(t, out=t))
        refused(torch.ones(4, 8), lambda t: hk.scale_cast(t, out=t, factor=2.0))
        for place in range(3):
            refused(torch.ones(4, 8), lambda t, i=place: hk.adamw_(None, *rest[:i], t, *rest[i:], step=1, lr=0.1))
        losses = hk.cross_entropy(leaf(randn(3, 8)) * 1.0, torch.tensor([0, 1, 2]), overwrite=True).sum()
        losses.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            losses.backward()


def test_out_may_be_the_input_but_not_share_a_part_of_it(library: Library) -> None:
    vector = randn(10, seed=3)
    for call in (
        lambda x, out=None: hk.layer_norm(x, vector, vector, out=out),
        lambda x, out=None: hk.rms_norm(x, out=out),
        lambda x, out=None: hk.bias_gelu(x, vector, out=out),
        lambda x, out=None: hk.masked_softmax(x, causal=True, out=out),
        lambda x, out=None: hk.bias_dropout_add(x, vector, x, p=0.5, keys=torch.arange(6), out=out),
    ):
        x, memory = randn(6, 10), torch.zeros(65)
        assert torch.equal(call(x), call(x, out=x))
        with pytest.raises(KernelInputError, match="memory"):
            call(memory[:60].view(6, 10), out=memory[5:].view(6, 10))
    for call in (
        lambda: hk.swiglu(memory[:60].view(6, 10), out=memory[:30].view(6, 5)),
        lambda: hk.layer_norm(randn(6, 10), memory[:10], out=memory[:60].view(6, 10)),
        lambda: hk.scale_cast(memory[:60], out=memory.view(torch.float16)[:60]),
        lambda: hk.bias_gelu(randn(6, 10), out=leaf(randn(6, 10))),
    ):
        with pytest.raises(KernelInputError, match=r"memory|gradient"):
            call()


def odd(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Contiguous, from the second element of its memory on."""
    return randn(math.prod(shape) + 1, dtype=dtype, seed=seed)[1:].view(shape)


def odd_cases() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Functions of a tensor of shape (2, 3, 32), with rows that can be cut into packs, at addresses that forbid it."""
    vector, table, targets = odd(32), odd(3, 16), torch.tensor([[0, 31, 7], [-100, 16, 4]])

    def strided(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, x[..., :1]), -1)

    return {
        "layer_norm": lambda x: hk.layer_norm(x, vector, vector),
        "add_rms_norm": lambda x: sum(hk.add_rms_norm(x, odd(*x.shape, dtype=x.dtype), vector)),
        "bias_gelu": lambda x: hk.bias_gelu(x, vector),
        "gelu": hk.bias_gelu,
        "swiglu": hk.swiglu,
        "masked_softmax": lambda x: hk.masked_softmax(x, torch.ones(33, dtype=torch.bool)[1:]),
        "bias_dropout_add": lambda x: hk.bias_dropout_add(x, vector, odd(*x.shape, dtype=x.dtype), p=0.5, keys=keys()),
        "dropout from element 2 on": lambda x: hk.bias_dropout_add(x * 1.0, p=0.5, keys=keys(), offset=2),
        "rotary": lambda x: hk.rotary(x, table, table),
        "rotary of rows 33 apart": lambda x: hk.rotary(strided(x)[..., :32], randn(3, 16), randn(3, 16)),
        "cross_entropy": lambda x: hk.cross_entropy(x, targets),
        "cross_entropy of rows 33 apart": lambda x: hk.cross_entropy(strided(x), targets, vocabulary=32),
    }


@pytest.mark.parametrize("case", odd_cases())
def test_packs_are_read_only_where_addresses_and_strides_allow_it(
    library: Library, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation = odd_cases()[case]
    for dtype in DTYPES:
        x, twin = (odd(2, 3, 32, dtype=dtype).requires_grad_() for _ in range(2))
        y = operation(x)
        y.backward(odd(*y.shape, dtype=y.dtype, seed=2))
        with monkeypatch.context() as patch:
            patch.setattr("pipert.hipkernels.runtime.DTYPES", {})
            y_twin = operation(twin)
            y_twin.backward(odd(*y.shape, dtype=y.dtype, seed=2))
        assert_close(y, y_twin, 8.0)
        assert_close(x.grad, twin.grad, 8.0)


def test_inputs_are_bitwise_unchanged(library: Library, operation: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = example()
    kept = x.detach().clone()
    operation(x).sum().backward()
    assert torch.equal(x, kept)
