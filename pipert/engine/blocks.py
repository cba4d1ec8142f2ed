"""How one block of the model is run: with its own random numbers, and with or without keeping its activations.

pipert's layers draw from streams named by layer, step and sample. Modules that know nothing of that use torch's global
generator; around each block that may, it is seeded from (seed, block, step, first sample) and restored afterwards. So
its numbers depend neither on the layout nor on what ran before, a recomputed forward draws the same ones, and the
caller's generator is as it was. A block says with an attribute ``uses_global_random = False`` that it needs none of
this.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from pipert.engine.deferred import Deferred, Products, deferring
from pipert.engine.recompute import Again, Marked, Recompute, recomputed
from pipert.randomness import Draw, digest, drawing, holding

Call = Callable[[str, nn.Module, tuple[Any, ...]], Any]

#: torch has one generator per process and device; ranks may be threads.
_GENERATOR = threading.RLock()

_RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.MultiheadAttention, nn.RNNBase)
_RANDOM_TOO = (nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def uses_global_random(function: object) -> bool:
    """Whether a call of this module (or loss function) may draw from torch's global generator.

    Its attribute ``uses_global_random`` decides where it has one. torch's own layers and losses are known; anything
    else may do anything.
    """
    said = getattr(function, "uses_global_random", None)
    if said is not None:
        return bool(said)
    if not isinstance(function, nn.Module):
        return getattr(function, "__module__", "") != "torch.nn.functional"
    known = type(function).__module__.startswith("torch.nn.") and not isinstance(function, (*_RANDOM, *_RANDOM_TOO))
    return not known or any(map(uses_global_random, function.children()))


class _Generator:
    """Torch's global generators, for one run of a block; restored afterwards, and while the block waits for others."""

    __slots__ = ("_before", "_device", "_holding", "_inside")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: list[torch.Tensor] = []
        self._inside: list[torch.Tensor] = []
        self._holding = holding(self)

    def __enter__(self) -> None:
        _GENERATOR.acquire()
        self._before = _states(self._device)
        self.begin()
        self._holding.__enter__()

    def begin(self) -> None:
        """Set the generators for the run."""
        _set_states(self._device, self._inside)

    def __exit__(self, *reason: Any) -> None:
        self._holding.__exit__(*reason)
        _set_states(self._device, self._before)
        _GENERATOR.release()

    def let_go(self) -> None:
        """The block waits for other ranks: those of this process may need the generators before they come."""
        self._inside = _states(self._device)
        _set_states(self._device, self._before)
        _GENERATOR.release()

    def take_back(self) -> None:
        """The block goes on."""
        _GENERATOR.acquire()
        self._before = _states(self._device)
        _set_states(self._device, self._inside)


class global_generator(_Generator):
    """Seed torch's global generators for one run of a block; restore them afterwards."""

    __slots__ = ("_key",)

    def __init__(self, draw: Draw, block: str, device: torch.device) -> None:
        super().__init__(device)
        self._key = digest(draw.seed, "global", block, draw.step, draw.samples[0] if draw.samples else 0)

    def begin(self) -> None:
        """Seed the generators."""
        if self._device.type != "cpu":
            accelerator = torch.get_device_module(self._device)
            with accelerator.device(self._device):
                accelerator.manual_seed(self._key)
        torch.default_generator.manual_seed(self._key)


class generator_again(_Generator):
    """Torch's global generators as they are where this is made, for a run later; they are restored afterwards."""

    __slots__ = ()

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._inside = _states(device)


def _states(device: torch.device) -> list[torch.Tensor]:
    states: list[torch.Tensor] = [torch.default_generator.get_state()]
    return states if device.type == "cpu" else [*states, torch.get_device_module(device).get_rng_state(device)]


def _set_states(device: torch.device, states: list[torch.Tensor]) -> None:
    torch.default_generator.set_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)


class BlockRunner:
    """Runs the blocks of one stage, for one micro-batch at a time.

    Args:
        blocks: name and module of each.
        device: where they live.
        recompute: what is computed again in the backward (``full`` is the stage's business).

    Attributes:
        draw: the step and samples that the next blocks compute.
        deferred: where they leave the weight gradients that are put off; None if none are.
    """

    def __init__(self, blocks: dict[str, nn.Module], device: torch.device, recompute: Recompute = "none") -> None:
        self.draw = Draw(0, 0, ())
        self.deferred: Deferred | None = None
        self._recompute = recompute
        self._marked = {n: Marked(module, n) for n, module in blocks.items()} if recompute == "selective" else {}
        self._device = device
        self._global = {name: uses_global_random(module) for name, module in blocks.items()}
        self._products = {name: Products(module) for name, module in blocks.items()}

    def __call__(self, name: str, module: nn.Module, *values: Any) -> Any:
        """Run a block on values."""
        run = self.bound(name, module, self._global[name])
        if self._recompute == "block" and torch.is_grad_enabled():
            return recomputed(run, module, f"block {name}", *values)
        return run(*values)

    def bound(self, name: str, function: Callable[..., Any], draws: bool) -> Callable[..., Any]:
        """The function as the present micro-batch needs it, with its random numbers, whenever it is called."""
        draw, deferred, device = self.draw, self.deferred, self._device
        products = self._products.setdefault(name, Products())
        if name in self._marked:
            function = self._once_more(self._marked[name], function, draws, products)

        def run(*values: Any) -> Any:
            with drawing(draw), deferring(deferred, products):
                if not draws:
                    return function(*values)
                with global_generator(draw, name, device):
                    return function(*values)

        return run

    def _once_more(
        self, marked: Marked, function: Callable[..., Any], draws: bool, products: Products
    ) -> Callable[..., Any]:
        """The function, whose marked layers run again in the backward as they ran before."""
        draw, deferred, device = self.draw, self.deferred, self._device

        @contextmanager
        def around() -> Iterator[None]:
            with drawing(draw), deferring(deferred, products):
                yield

        def again(layer: nn.Module) -> Again:
            """What is around a marked layer's second run: as far as it may draw global numbers, those of the first."""
            if not (draws and uses_global_random(layer)):
                return around
            state = generator_again(device)
            return lambda: _both(around(), state)

        def run(*values: Any) -> Any:
            with marked.once_more(again):
                return function(*values)

        return run


@contextmanager
def _both(one: AbstractContextManager[object], other: AbstractContextManager[object]) -> Iterator[None]:
    with one, other:
        yield
