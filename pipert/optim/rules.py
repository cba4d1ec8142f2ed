"""Update rules: how a bucket's weights follow from its gradients; AdamW, and any element-wise torch optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import pipert.hipkernels as hk
from pipert.errors import ConfigError
from pipert.hipkernels.errors import KernelError
from pipert.hipkernels.ops.optimizer import adamw_
from pipert.optim.bucket import Bucket

#: Makes an optimizer over parameters, or groups of them.
Factory = Callable[[Any], torch.optim.Optimizer]

Group = Mapping[str, Any]

#: What is kept for a parameter, or a piece of one, by name.
Kept = Mapping[str, torch.Tensor | float]


class Rule(ABC):
    """Updates buckets, one at a time. What it keeps for a bucket has the size of its shard.

    Attributes:
        needs: what a parameter's state must have to be loaded.
    """

    needs: tuple[str, ...] = ()

    @abstractmethod
    def prepare(self, buckets: Sequence[Bucket], groups: Sequence[dict[str, Any]]) -> None:
        """Get ready to update these buckets. ``groups[bucket.group]`` gets the hyper-parameters it lacks."""

    @abstractmethod
    def step(self, bucket: Bucket, group: Group) -> None:
        """Update the weights that have a gradient."""

    @abstractmethod
    def state(self, bucket: Bucket) -> list[dict[str, torch.Tensor | float]]:
        """What is kept for each of the bucket's pieces, by name: tensors of its size, and numbers."""

    @abstractmethod
    def load(self, bucket: Bucket, pieces: Sequence[Kept], whole: Sequence[Kept]) -> None:
        """Go on from a `state`; ``whole`` is what was kept for each parameter, also those without a piece here."""

    @abstractmethod
    def save(self, bucket: Bucket) -> Callable[[], None]:
        """Copy what an update changes; returns a function that puts it back, to the bit."""

    @abstractmethod
    def tensors(self, bucket: Bucket) -> Iterable[torch.Tensor]:
        """All tensors that are kept for a bucket, for counting memory."""


@dataclass
class _Moments:
    """AdamW's memory of one bucket: running means of gradient and square, and each parameter's steps so far."""

    average: torch.Tensor
    square: torch.Tensor
    steps: list[int]


class AdamW(Rule):
    """AdamW (Loshchilov and Hutter 2019) in one pass over memory, with `torch.optim.AdamW`'s numbers.

    Neighbours in a shard that have made as many steps are updated together.
    """

    needs = ("step", "exp_avg", "exp_avg_sq")

    def __init__(self) -> None:
        self._moments: dict[Bucket, _Moments] = {}

    def prepare(self, buckets: Sequence[Bucket], groups: Sequence[dict[str, Any]]) -> None:
        """Build the kernels, and make the moments of what is trained now; others' come with their first gradient."""
        for bucket in buckets:
            if bucket.group is not None and bucket.trainable:
                self._of(bucket)
                _prepare_kernels(bucket)

    def _of(self, bucket: Bucket) -> _Moments:
        if bucket not in self._moments:
            zeros = torch.zeros_like(bucket.need_master())
            self._moments[bucket] = _Moments(zeros, zeros.clone(), [0] * len(bucket.entries))
        return self._moments[bucket]

    def step(self, bucket: Bucket, group: Group) -> None:
        """Update the weights that have a gradient; the steps of others do not count."""
        present = [bucket.has_gradient(number) for number in range(len(bucket.entries))]
        if not any(present):
            return
        master, moments = bucket.need_master(), self._of(bucket)
        moments.steps = [steps + here for steps, here in zip(moments.steps, present, strict=True)]
        beta1, beta2 = map(float, group["betas"])
        for start, stop, steps, gradient in _runs(bucket, moments.steps):
            param = bucket.shard[start:stop] if master is not bucket.shard else None
            adamw_(
                param,
                master[start:stop],
                moments.average[start:stop],
                moments.square[start:stop],
                gradient,
                step=steps,
                lr=float(group["lr"]),
                betas=(beta1, beta2),
                eps=float(group["eps"]),
                weight_decay=float(group["weight_decay"]),
            )

    def state(self, bucket: Bucket) -> list[dict[str, torch.Tensor | float]]:
        """``exp_avg``, ``exp_avg_sq`` and ``step``, named as torch's."""
        moments = self._moments.get(bucket)
        if moments is None:
            return [{} for _ in bucket.pieces]
        return [
            {
                "step": float(moments.steps[piece.parameter]),
                "exp_avg": moments.average[piece.start : piece.stop],
                "exp_avg_sq": moments.square[piece.start : piece.stop],
            }
            if moments.steps[piece.parameter]
            else {}
            for piece in bucket.pieces
        ]

    def load(self, bucket: Bucket, pieces: Sequence[Kept], whole: Sequence[Kept]) -> None:
        """Go on from a `state`."""
        moments = self._of(bucket) if any(whole) else self._moments.get(bucket)
        if moments is None:
            return
        moments.steps = [int(kept.get("step", 0)) for kept in whole]
        moments.average.zero_()
        moments.square.zero_()
        for piece, kept in zip(bucket.pieces, pieces, strict=True):
            if kept:
                moments.average[piece.start : piece.stop].copy_(torch.as_tensor(kept["exp_avg"]))
                moments.square[piece.start : piece.stop].copy_(torch.as_tensor(kept["exp_avg_sq"]))

    def save(self, bucket: Bucket) -> Callable[[], None]:
        """Copies of master and moments."""
        moments, master = self._of(bucket), bucket.need_master()
        kept = [(tensor, tensor.clone()) for tensor in (master, moments.average, moments.square)]
        steps = list(moments.steps)

        def restore() -> None:
            for tensor, before in kept:
                tensor.copy_(before)
            moments.steps = steps
            bucket.round_master()

        return restore

    def tensors(self, bucket: Bucket) -> Iterable[torch.Tensor]:
        """Both moments."""
        moments = self._moments.get(bucket)
        return () if moments is None else (moments.average, moments.square)


def _prepare_kernels(bucket: Bucket) -> None:
    """So that no step waits for a compiler."""
    if bucket.need_master().dtype != torch.float32:
        return
    try:
        hk.prepare(bucket.flat.device)
    except KernelError as error:
        raise ConfigError(str(error)) from error


def _runs(bucket: Bucket, steps: Sequence[int]) -> list[tuple[int, int, int, torch.Tensor]]:
    """Start, stop, step number and gradient of neighbouring pieces that are updated alike."""
    runs: list[tuple[int, int, int, torch.Tensor]] = []
    for piece, gradient in bucket.gradients():
        start, count = piece.start, steps[piece.parameter]
        if bucket.zero and runs and runs[-1][1] == start and runs[-1][2] == count:
            start = runs.pop()[0]
            assert bucket.gradient is not None
            gradient = bucket.gradient[start : piece.stop]
        runs.append((start, piece.stop, count, gradient))
    return runs


class Elementwise(Rule):
    """A torch optimizer over the pieces of the shards: right if each element's update depends on that element alone.

    Args:
        factory: makes it from parameter groups.

    Raises:
        ConfigError: `prepare` finds that it is not element-wise.
    """

    def __init__(self, factory: Factory) -> None:
        self._factory = factory
        self._parameters: dict[Bucket, list[torch.nn.Parameter]] = {}
        self._inner: torch.optim.Optimizer | None = None

    def prepare(self, buckets: Sequence[Bucket], groups: Sequence[dict[str, Any]]) -> None:
        """Make the optimizer; the groups get its hyper-parameters."""
        check_elementwise(self._factory)
        inner: list[dict[str, Any]] = [{**group, "params": []} for group in groups]
        for bucket in buckets:
            if bucket.group is not None:
                master = bucket.need_master()
                pieces = [torch.nn.Parameter(master[piece.start : piece.stop]) for piece in bucket.pieces]
                self._parameters[bucket] = pieces
                inner[bucket.group]["params"] += pieces
        self._inner = self._factory(inner)
        for group, filled in zip(groups, self._inner.param_groups, strict=True):
            group.update({key: value for key, value in filled.items() if key != "params"})

    def step(self, bucket: Bucket, group: Group) -> None:
        """Let the optimizer update this bucket's pieces and no others."""
        assert self._inner is not None
        assert bucket.group is not None
        self._inner.param_groups[bucket.group].update({k: v for k, v in group.items() if k != "params"})
        by_piece = dict(zip(bucket.pieces, self._parameters[bucket], strict=True))
        for piece, gradient in bucket.gradients():
            by_piece[piece].grad = gradient.to(by_piece[piece].dtype)
        self._inner.step()
        for parameter in by_piece.values():
            parameter.grad = None
        bucket.round_master()

    def state(self, bucket: Bucket) -> list[dict[str, torch.Tensor | float]]:
        """What the optimizer keeps."""
        assert self._inner is not None
        return [
            {
                name: value if isinstance(value, torch.Tensor) and value.dim() else float(value)
                for name, value in self._inner.state.get(parameter, {}).items()
                if value is not None
            }
            for parameter in self._parameters.get(bucket, ())
        ]

    def load(self, bucket: Bucket, pieces: Sequence[Kept], whole: Sequence[Kept]) -> None:
        """Go on from a `state`."""
        assert self._inner is not None
        for parameter, kept in zip(self._parameters.get(bucket, ()), pieces, strict=False):
            self._inner.state[parameter] = {
                name: value.clone() if isinstance(value, torch.Tensor) else torch.tensor(float(value))
                for name, value in kept.items()
            }

    def save(self, bucket: Bucket) -> Callable[[], None]:
        """Copies of the master and of everything that the optimizer keeps."""
        inner, master = self._inner, bucket.need_master()
        assert inner is not None
        before = master.clone()
        kept = {
            parameter: {
                name: value.clone() if isinstance(value, torch.Tensor) else value
                for name, value in inner.state.get(parameter, {}).items()
            }
            for parameter in self._parameters[bucket]
        }

        def restore() -> None:
            master.copy_(before)
            for parameter, state in kept.items():
                inner.state.pop(parameter, None)
                if state:
                    inner.state[parameter] = state
            bucket.round_master()

        return restore

    def tensors(self, bucket: Bucket) -> Iterable[torch.Tensor]:
        """All tensors of the bucket's states that are no single numbers."""
        states = () if self._inner is None else map(self._inner.state.get, self._parameters.get(bucket, ()))
        return [
            value
            for state in states
            for value in (state or {}).values()
            if isinstance(value, torch.Tensor) and value.dim()
        ]


@torch.enable_grad()
def check_elementwise(factory: Factory) -> None:
    """Try an optimizer on a matrix whole and in pieces.

    Raises:
        ConfigError: the results differ, or it cannot update vectors: shards would not be updated as whole weights are.
    """
    generator = torch.Generator().manual_seed(1)
    start, *steps = torch.randn(4, 12, generator=generator, dtype=torch.float64)
    whole = torch.nn.Parameter(start.clone().view(3, 4))
    pieces = [torch.nn.Parameter(start[:5].clone()), torch.nn.Parameter(start[5:].clone())]
    try:
        both = [factory([{"params": [whole]}]), factory([{"params": pieces}])]
        for gradient in steps:
            whole.grad = gradient.view(3, 4).clone()
            pieces[0].grad, pieces[1].grad = gradient[:5].clone(), gradient[5:].clone()
            for optimizer in both:
                optimizer.step()
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"the optimizer cannot update shards ({str(error).partition(chr(10))[0]:.200}); use one that updates each "
            "element by itself, such as AdamW, Adam or SGD, and whose step() takes no closure"
        ) from error
    if not torch.allclose(whole.detach().view(-1), torch.cat([p.detach() for p in pieces]), rtol=1e-9, atol=1e-12):
        raise ConfigError(
            f"{type(both[0]).__name__} updates a weight otherwise when it is cut into shards; use an optimizer that "
            "updates each element by itself, such as AdamW, Adam or SGD"
        )
