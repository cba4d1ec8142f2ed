"""What is known of the sizes at the boundaries, so that they travel once for each new signature and never again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from pipert.engine.boundary import BoundarySpec, check_same
from pipert.errors import BoundaryError

Key = Hashable


class SizeBook:
    """The specification of every boundary of this rank, for each signature of inputs seen lately.

    All ranks of a pipeline look up and store the same keys in the same order, so they agree about what is known without
    asking each other.

    Args:
        capacity: how many signatures are remembered.
        dynamic: remember nothing, because sizes depend on data.
    """

    def __init__(self, capacity: int = 512, dynamic: bool = False) -> None:
        self._capacity = capacity
        self._dynamic = dynamic
        self._known: OrderedDict[Key, dict[int, BoundarySpec]] = OrderedDict()

    def knows(self, keys: Sequence[Key]) -> bool:
        """Whether no sizes need to travel for micro-batches with these keys."""
        return not self._dynamic and all(key in self._known for key in keys)

    def step(self, keys: Sequence[Key]) -> StepSizes:
        """The sizes of one step."""
        if self._dynamic:
            return StepSizes([{} for _ in keys], check=False)
        found: dict[Key, dict[int, BoundarySpec]] = {key: self._known.get(key, {}) for key in keys}
        return StepSizes([found[key] for key in keys])

    def learn(self, keys: Sequence[Key], sizes: StepSizes) -> None:
        """After a step: remember its sizes."""
        if self._dynamic:
            return
        for key, specs in zip(keys, sizes.specs, strict=True):
            self._known[key] = specs
            self._known.move_to_end(key)
        while len(self._known) > self._capacity:
            self._known.popitem(last=False)


class StepSizes:
    """The specifications of one step: for each micro-batch by the stage that the boundary leads to.

    Micro-batches of the same signature share theirs.
    """

    def __init__(self, specs: list[dict[int, BoundarySpec]], check: bool = True) -> None:
        self.specs = specs
        self._check = check

    def sent(self, stage: int, microbatch: int, spec: BoundarySpec) -> None:
        """The stage hands over a value of this specification.

        Raises:
            BoundaryError: it is not what its signature had before.
        """
        known = self.specs[microbatch].setdefault(stage + 1, spec)
        if known is not spec and self._check:
            check_same(spec, known, stage, microbatch)

    def told(self, stage: int, microbatch: int, spec: BoundarySpec) -> None:
        """The previous rank says what the stage will get."""
        self.specs[microbatch][stage] = spec

    def before(self, stage: int, microbatch: int) -> BoundarySpec:
        """What crosses the boundary before the stage.

        Raises:
            BoundaryError: nobody has said so yet.
        """
        spec = self.specs[microbatch].get(stage)
        if spec is None:
            raise BoundaryError(f"stage {stage}, micro-batch {microbatch}: the sizes of its input are not known yet")
        return spec
