"""What is known of the boundaries, so that it travels once for each new signature and never again.

That is the specification of what crosses, and which of the tensors that require a gradient get one: a tensor that the
later stages ignore or detach has none, and no bytes of it flow back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from pipert.engine.boundary import BoundarySpec, check_same
from pipert.errors import BoundaryError

Key = Hashable
#: For each tensor of a boundary that requires a gradient: whether it gets one.
Used = tuple[bool, ...]


@dataclass(slots=True)
class _Boundaries:
    """What is known for one signature, by the stage that the boundary leads to.

    Attributes:
        specs: what crosses.
        used: which gradients flow back; unknown until a micro-batch of a weight above 0 ran backward.
    """

    specs: dict[int, BoundarySpec] = field(default_factory=dict)
    used: dict[int, Used] = field(default_factory=dict)


class SizeBook:
    """What is known of every boundary of this rank, for each signature of inputs seen lately.

    All ranks of a pipeline look up and store the same keys in the same order, so they agree about what is known without
    asking each other.

    Args:
        capacity: how many signatures are remembered.
        dynamic: remember nothing, because it depends on data.
    """

    def __init__(self, capacity: int = 512, dynamic: bool = False) -> None:
        self._capacity = capacity
        self._dynamic = dynamic
        self._known: OrderedDict[Key, _Boundaries] = OrderedDict()

    def knows(self, keys: Sequence[Key]) -> bool:
        """Whether no sizes need to travel for micro-batches with these keys."""
        return not self._dynamic and all(key in self._known for key in keys)

    def step(self, keys: Sequence[Key], weights: Sequence[float]) -> StepSizes:
        """The sizes of one step, whose micro-batches have these weights in the loss."""
        if self._dynamic:
            return StepSizes([_Boundaries() for _ in keys], weights, check=False)
        found = {key: self._known.get(key) or _Boundaries() for key in keys}
        return StepSizes([found[key] for key in keys], weights)

    def learn(self, keys: Sequence[Key], sizes: StepSizes) -> None:
        """After a step: remember its sizes."""
        if self._dynamic:
            return
        for key, boundaries in zip(keys, sizes.learned(), strict=True):
            self._known[key] = boundaries
            self._known.move_to_end(key)
        while len(self._known) > self._capacity:
            self._known.popitem(last=False)


class StepSizes:
    """What is known of the boundaries in one step. Micro-batches of the same signature share it.

    The specification of a boundary is known as soon as a micro-batch has crossed it. Which gradients flow back counts
    as known from the next step on, so both ends agree about it at any time of a step.
    """

    def __init__(
        self, boundaries: list[_Boundaries] | None = None, weights: Sequence[float] = (), check: bool = True
    ) -> None:
        self._boundaries = boundaries or []
        self._weights = weights
        self._check = check
        self._found: dict[tuple[int, int], Used] = {}

    def sent(self, stage: int, microbatch: int, spec: BoundarySpec) -> None:
        """The stage hands over a value of this specification.

        Raises:
            BoundaryError: it is not what its signature had before.
        """
        known = self._boundaries[microbatch].specs.setdefault(stage + 1, spec)
        if known is not spec and self._check:
            check_same(spec, known, stage, microbatch)

    def told(self, stage: int, microbatch: int, spec: BoundarySpec) -> None:
        """The previous rank says what the stage will get."""
        self._boundaries[microbatch].specs[stage] = spec

    def before(self, stage: int, microbatch: int) -> BoundarySpec:
        """What crosses the boundary before the stage.

        Raises:
            BoundaryError: nobody has said so yet.
        """
        spec = self._boundaries[microbatch].specs.get(stage)
        if spec is None:
            raise BoundaryError(f"stage {stage}, micro-batch {microbatch}: the sizes of its input are not known yet")
        return spec

    def used(self, stage: int, microbatch: int) -> Used | None:
        """Which gradients flow back over the boundary before the stage; None if that must travel with them.

        A micro-batch of weight 0 has none.
        """
        if not self._weights[microbatch]:
            return (False,) * len(self.before(stage, microbatch).gradients)
        return self._boundaries[microbatch].used.get(stage)

    def found(self, stage: int, microbatch: int, used: Used) -> None:
        """These gradients flow back.

        Raises:
            BoundaryError: one of them did not before, so the previous stage makes no room for it.
        """
        known = self.used(stage, microbatch)
        if known is None:
            self._found[microbatch, stage] = used
        elif any(now and not before for now, before in zip(used, known, strict=True)):
            spec = self.before(stage, microbatch)
            new = next(i for i, now, before in zip(spec.with_gradient, used, known, strict=True) if now and not before)
            raise BoundaryError(
                f"stage {stage}, micro-batch {microbatch}: a gradient flows back for tensor {new} of the input, "
                f"{spec.tensors[new]}, but for inputs of the same structure, shapes and dtypes none did before, so "
                f"stage {stage - 1} makes no room for it; if it depends on the data or the step what is used, use "
                "Pipeline(…, dynamic=True), which sends that with every micro-batch"
            )

    def learned(self) -> list[_Boundaries]:
        """After the step: what is known now, for each micro-batch."""
        for (microbatch, stage), found in self._found.items():
            used = self._boundaries[microbatch].used
            used[stage] = tuple(map(any, zip(found, used.get(stage, found), strict=True)))
        self._found.clear()
        return self._boundaries
