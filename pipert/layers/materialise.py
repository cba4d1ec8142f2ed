"""Turn the meta parameters of one block into real ones, with values that depend on (seed, name) only.

A model is built on the meta device, where tensors have shapes but no memory. Each rank materialises the blocks it
owns, so no rank ever holds the whole model, and every layout starts from the same numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipert.errors import ConfigError
from pipert.layers.dropout import name_layers
from pipert.layers.initial import Initialises
from pipert.layers.names import join
from pipert.layers.shard import shard_of
from pipert.randomness import stream


def materialise(
    block: nn.Module,
    name: str,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> nn.Module:
    """Allocate and initialise the meta parameters and buffers of ``block``, in place.

    A submodule with ``init_parameters(seed, prefix)`` fills what it owns itself (see
    `pipert.layers.initial.Initialises`). Others, such as torch's own layers, are filled by their
    ``reset_parameters()``, with every random number taken from ``stream(seed, submodule name)`` instead of the global
    generator, which is neither read nor advanced. Values are made in float32 on the CPU and then converted.

    A parameter that several modules share is filled by the first of them and stays one object, also when the modules
    are in blocks that are materialised one by one. On a rank without the first one, the values are the first one's only
    if the module knows its name (pipert's GPT does); otherwise the pipeline sends them there.

    Parameters are new objects (a meta tensor cannot become a real one), so take references to them afterwards. Tensors
    that are real already are left as they are. Dropout layers get their names.

    Args:
        block: a module of the model, or the whole model.
        name: the block's name in the whole model, ``""`` for the model itself.
        device: where the tensors shall live; default the CPU.
        dtype: dtype of the floating-point tensors; default the one they were declared with.
        seed: the run's seed.

    Returns:
        the block.

    Raises:
        ConfigError: a submodule owns meta tensors and has no way to initialise them, or does so with a random
            operation that cannot be given a generator. Nothing has been allocated in the first case.
    """
    target = torch.device(device or "cpu")
    name_layers(block, name)
    claimed: set[int] = set()
    works = []
    for path, module in block.named_modules():
        names = [key for key, tensor in _own(module) if tensor.is_meta and not hasattr(tensor, _REAL)]
        names = [key for key in names if id(getattr(module, key)) not in claimed]
        claimed |= {id(getattr(module, key)) for key in names}
        if names:
            works.append((module, names, _filler(module, join(name, path), seed)))
    for module, names, fill in reversed(works):  # children before parents, as torch initialises them
        _fill(module, names, fill, target, dtype)
    for module in block.modules():
        for key, tensor in _own(module):
            if hasattr(tensor, _REAL):
                setattr(module, key, getattr(tensor, _REAL))
    return block


def template(module: nn.Module) -> tuple[nn.Module, ...]:
    """A copy of a whole module without values, from which its parts learn what theirs are; none if it has values.

    It lies in a tuple, so that a module that keeps it does not take it for a submodule.
    """
    whole = any(not tensor.is_meta for _, tensor in _own(module))
    return () if whole else (copy.deepcopy(module),)


@torch.no_grad()
def fill_like(part: nn.Module, whole: nn.Module, seed: int, prefix: str) -> None:
    """Fill a module's parameters with their parts of what a whole module of another class gets; one at a time is whole.

    Args:
        part: its parameters are called as the whole module's.
        whole: from `template`.
        seed: the run's seed.
        prefix: the module's name in the model.
    """
    values = materialise(copy.deepcopy(whole), prefix, "cpu", torch.float32, seed)
    for name, parameter in part.named_parameters(recurse=False):
        shard, value = shard_of(parameter), getattr(values, name)
        parameter.copy_(value if shard is None else shard.take(value))


_REAL = "_pipert_real"
"""Attribute of a meta tensor: the real one that took its place, for modules that still have to be told."""


def _own(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers that the module owns itself."""
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]


def _filler(module: nn.Module, prefix: str, seed: int) -> Callable[[], None]:
    """How the module fills what it owns."""
    if isinstance(module, Initialises):
        return lambda: module.init_parameters(seed, prefix)
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if not callable(reset):
        raise ConfigError(
            f"{prefix} ({type(module).__name__}) has parameters or buffers on the meta device and no way to "
            "initialise them; give it init_parameters(seed, prefix), or build the model on a real device"
        )

    def fill() -> None:
        with _RandomNumbersFrom(stream(seed, prefix), prefix):
            reset()

    return fill


def _fill(
    module: nn.Module, names: list[str], fill: Callable[[], None], device: torch.device, dtype: torch.dtype | None
) -> None:
    """Put drafts in place of the module's meta tensors, let it fill them, convert those named to what was asked for.

    All are drafted, so that the random numbers of one tensor never depend on which others were filled elsewhere.
    """
    metas = {name: tensor for name, tensor in _own(module) if tensor.is_meta}
    kept = [(tensor, tensor.detach().clone()) for _, tensor in _own(module) if not tensor.is_meta]
    for name, meta in metas.items():
        draft = torch.float32 if meta.is_floating_point() else meta.dtype
        setattr(module, name, _like(meta, torch.empty(meta.shape, dtype=draft)))
    with torch.no_grad():
        fill()
        for tensor, value in kept:
            tensor.copy_(value)
    for name, meta in metas.items():
        if name not in names:
            setattr(module, name, meta)
            continue
        wanted = dtype if dtype and meta.is_floating_point() else meta.dtype
        real = _like(meta, getattr(module, name).detach().to(device, wanted))
        setattr(module, name, real)
        setattr(meta, _REAL, real)


def _like(meta: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
    """``content`` as a parameter where ``meta`` is one, with its attributes."""
    if isinstance(meta, nn.Parameter):
        content = nn.Parameter(content, meta.requires_grad)
    content.__dict__.update(meta.__dict__)
    return content


class _RandomNumbersFrom(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every random operation of this thread draws from the generator given, not from the global one."""

    def __init__(self, generator: torch.Generator, doing: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = generator
        self.doing = doing

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            func = self._with_generator(func)
            kwargs["generator"] = self.generator
        return func(*args, **kwargs)

    def _with_generator(self, func: Any) -> Any:
        """The overload of a random operation that takes a generator: ``randn`` has a second one, ``normal_`` one."""
        if any(argument.name == "generator" for argument in func._schema.arguments):
            return func
        overload = "generator" if func._overloadname == "default" else f"{func._overloadname}_generator"
        packet = func.overloadpacket
        if overload not in packet.overloads():
            raise ConfigError(
                f"{self.doing}: reset_parameters() calls {packet}, which takes no generator, so its values would "
                "depend on the layout; give the module init_parameters(seed, prefix)"
            )
        return getattr(packet, overload)
