"""Activations that are computed a second time in the backward instead of kept.

| mode | kept of a micro-batch | computed again |
|---|---|---|
| ``none`` | everything that autograd saves | nothing |
| ``selective`` | all but what is inside marked layers | those: in pipert's GPT the attention between its projections |
| ``block`` | the inputs of the blocks | one block after the other |
| ``full`` | the input of the stage | the stage at once |

A layer marks itself for ``selective`` by an attribute ``recompute_me``: True for its ``forward``, or the name of the
method that is cheap to compute again for what it keeps:

    class Attention(nn.Module):
        recompute_me = "core"

        def forward(self, x):
            return self.out(self.core(self.qkv(x)))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, cast, get_args

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipert.engine.structure import flatten
from pipert.errors import BoundaryError, ConfigError

Recompute = Literal["none", "selective", "block", "full"]

#: One mode for all stages, one for each stage, or some by the stage's number (the others: none).
RecomputeSetting = Recompute | Sequence[Recompute] | Mapping[int, Recompute]

#: Gives what must be around the second run of a function, beside that its numbers are drawn as before.
Again = Callable[[], AbstractContextManager[object]]


def per_stage(setting: RecomputeSetting, stages: int) -> tuple[Recompute, ...]:
    """The mode of each stage.

    Raises:
        ConfigError: no such mode, no such stage, or not one for each stage.
    """
    modes: tuple[object, ...]
    if isinstance(setting, str):
        modes = (setting,) * stages
    elif isinstance(setting, Mapping):
        strange = [stage for stage in setting if stage not in range(stages)]
        if strange:
            raise ConfigError(f"recompute names stage {strange[0]!r}; the stages are 0 to {stages - 1}")
        modes = tuple(setting.get(stage, "none") for stage in range(stages))
    elif isinstance(setting, Sequence) and len(setting) == stages:
        modes = tuple(setting)
    else:
        raise ConfigError(
            f"recompute = {setting!r:.80} for {stages} stages: give one mode, one for each stage, or {{stage: mode}}"
        )
    wrong = [mode for mode in modes if mode not in get_args(Recompute)]
    if wrong:
        raise ConfigError(f"recompute = {wrong[0]!r:.60} is none of {', '.join(map(repr, get_args(Recompute)))}")
    return cast("tuple[Recompute, ...]", modes)


def recomputed(run: Callable[..., Any], module: nn.Module, what: str, *values: Any) -> Any:
    """Call ``run(*values)`` without keeping its activations; its backward calls it again first.

    The second run changes no buffers (such as running statistics): the first one did.

    Raises:
        BoundaryError: the values were changed in place, so a second run would start from something else.
    """
    tensors, _ = flatten(values)
    versions = [tensor._version for tensor in tensors]

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), keeping_buffers(module)

    result = checkpoint(run, *values, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    for tensor, version in zip(tensors, versions, strict=True):
        if tensor._version != version:
            raise BoundaryError(
                f"{what} changes its input of shape {list(tensor.shape)} in place, so it cannot be recomputed from it; "
                "use "
                'recompute="none", or let the block work on a clone'
            )
    return result


@contextmanager
def keeping_buffers(module: nn.Module) -> Iterator[None]:
    """Let the module work on copies of its buffers, and put the originals back."""
    originals = [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    for owner, name, buffer in originals:
        owner._buffers[name] = buffer.clone()
    try:
        yield
    finally:
        for owner, name, buffer in originals:
            owner._buffers[name] = buffer


class Marked:
    """The layers of a block that say ``recompute_me``.

    Args:
        block: the block.
        name: what it is called.

    Raises:
        ConfigError: a layer names a method that it has not.
    """

    def __init__(self, block: nn.Module, name: str) -> None:
        self._places: list[tuple[nn.Module, str, str]] = []
        for path, layer in block.named_modules():
            said = getattr(layer, "recompute_me", False)
            method = "forward" if said is True else said
            if method and not callable(getattr(layer, str(method), None)):
                raise ConfigError(
                    f"{name}.{path} ({type(layer).__name__}) says recompute_me = {said!r:.40}, which is none of its "
                    "methods; use True for its forward, or a method's name"
                )
            if method:
                self._places.append((layer, str(method), f"{name}.{path}.{method}"))

    @contextmanager
    def once_more(self, again: Callable[[nn.Module], Again]) -> Iterator[None]:
        """Within it what the layers marked keeps no activations.

        Args:
            again: called where a layer begins its first run; what it gives is entered around the second one.
        """
        before = [(layer, method, layer.__dict__.get(method)) for layer, method, _ in self._places]
        for layer, method, what in self._places:
            layer.__dict__[method] = _Twice(getattr(layer, method), layer, what, again)
        try:
            yield
        finally:
            for layer, method, value in before:
                if value is None:
                    del layer.__dict__[method]
                else:
                    layer.__dict__[method] = value


class _Twice:
    """Stands in for a method whose activations are computed a second time."""

    __slots__ = ("_again", "_layer", "_method", "_what")

    def __init__(
        self, method: Callable[..., Any], layer: nn.Module, what: str, again: Callable[[nn.Module], Again]
    ) -> None:
        self._method, self._layer, self._what, self._again = method, layer, what, again

    def __call__(self, *values: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._method(*values, **named)
        around: list[Again] = []
        again = self._again(self._layer)

        def run(*values: Any) -> Any:
            context = around[0]() if around else nullcontext()
            around[:] = [again]
            with context:
                return self._method(*values, **named)

        return recomputed(run, self._layer, self._what, *values)
