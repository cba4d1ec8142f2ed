"""What a search is about, as flat arrays: stages, their times, the ranks' memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pipert.scheduler.action import Kind
from pipert.scheduler.costs import Costs
from pipert.scheduler.errors import LayoutError
from pipert.scheduler.placement import Placement, is_whole, positive
from pipert.scheduler.worklist import Ints, Seconds

#: One number for all ranks, one for each, or none at all.
Limits = int | Sequence[int] | None


@dataclass(frozen=True, eq=False)
class Instance:
    """The work of a step with its backwards in halves, the ranks that do it, and the memory they have.

    Attributes:
        placement: the rank of every stage.
        microbatches: m, of a step.
        forward: seconds of F, ``[stages]``.
        inputs: seconds of I, likewise.
        weights: seconds of W, likewise.
        hops: seconds between stage s and s + 1, 0 where they are on one rank, ``[stages]`` (the last one is 0).
        limits: the most (stage, micro-batch) pairs whose activations a rank may keep, ``[ranks]``.
    """

    placement: Placement
    microbatches: int
    forward: Seconds
    inputs: Seconds
    weights: Seconds
    hops: Seconds
    limits: Ints

    @classmethod
    def of(cls, costs: Costs, placement: Placement, microbatches: int, limits: Limits = None) -> Instance:
        """Read the times of every stage from the costs.

        Raises:
            LayoutError: a rank has too little memory for one micro-batch, or there is not one limit for each rank.
            CostError: the costs are for another number of stages.
        """
        table = costs.table(placement.num_stages)
        owners = np.array(placement.owners)
        hops = np.zeros(len(owners))
        hops[:-1] = table[Kind.SEND_F, :-1] * (owners[:-1] != owners[1:])
        allowed = _limits(limits, placement, positive("microbatches", microbatches))
        return cls(placement, microbatches, table[Kind.F], table[Kind.I], table[Kind.W], hops, allowed)

    def with_microbatches(self, microbatches: int) -> Instance:
        """The same for another number of micro-batches."""
        values = (self.forward, self.inputs, self.weights, self.hops, self.limits)
        return Instance(self.placement, microbatches, *values)

    @property
    def owners(self) -> Ints:
        """The rank of every stage."""
        return np.array(self.placement.owners, dtype=np.int64)

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return self.placement.num_stages

    @property
    def num_actions(self) -> int:
        """The number of actions: F, I and W of every micro-batch on every stage."""
        return 3 * self.num_stages * self.microbatches


def _limits(limits: Limits, placement: Placement, microbatches: int) -> Ints:
    """One limit a rank, never more than there is to keep."""
    stages = np.bincount(np.array(placement.owners))
    most = stages * microbatches
    if limits is None:
        return most
    each = list(limits) if isinstance(limits, Iterable) else [limits] * len(stages)
    if len(each) != len(stages) or not all(map(is_whole, each)):
        raise LayoutError(f"limits = {limits!r:.60} for {len(stages)} ranks; give one integer, or one for each rank")
    for rank, (limit, least) in enumerate(zip(each, stages.tolist(), strict=True)):
        if limit < least:
            rule = f"one micro-batch needs {least}: an activation for each of its stages"
            raise LayoutError(f"rank {rank} may keep {limit} activations, but {rule}; raise the limit")
    return np.array([min(limit, has) for limit, has in zip(each, most.tolist(), strict=True)], dtype=np.int64)
