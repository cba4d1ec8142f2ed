"""``schedule="auto"``: the stages' times, a placement, and a schedule that was searched for them.

Rank 0 cuts the model for each placement, searches a schedule for the stages' times and the ranks' memory, and takes the
fastest. The others are told. Schedules for other numbers of micro-batches are searched when they are needed, by each
rank for itself: the search gives the same answer for the same times.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from pipert.errors import ConfigError
from pipert.partition.partition import Partition, Stage
from pipert.scheduler.action import MICROBATCH_MASK
from pipert.scheduler.costs import Costs
from pipert.scheduler.formats.text import dumps, loads
from pipert.scheduler.lower import lower
from pipert.scheduler.placement import Placement
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.search import search
from pipert.scheduler.search.found import Found
from pipert.scheduler.search.whole import whole
from pipert.scheduler.semantics import Semantics
from pipert.scheduler.simulate import simulate

Shape = Literal["flat", "v", "looped"]


@dataclass(frozen=True)
class AutoOptions:
    """What ``schedule="auto"`` may do.

    Attributes:
        in_flight: the most micro-batches whose activations a rank keeps, for all ranks or each; one that is live in one
            of a rank's two stages counts half. Default: as many as there are ranks, 1F1B's memory.
        memory: the most bytes that a rank uses for weights, gradients, moments and activations, for all ranks or each.
            It needs an ``example``.
        placements: how stages may lie on ranks: one a rank (``flat``), two in a V, or several in turns (``looped``).
        costs: the stages' times, such as `pipert.Pipeline.measured_costs` gives, in place of profiled blocks; they also
            say how many stages there are.
        effort: of each search, in actions visited.
        state: bytes kept per byte of parameters: 4 for weights, gradients and two moments of one type.

    Raises:
        ConfigError: an unknown placement, or none.
    """

    in_flight: int | Sequence[int] | None = None
    memory: int | Sequence[int] | None = None
    placements: Sequence[Shape] = ("flat", "v", "looped")
    costs: Costs | None = None
    effort: int = 2_000_000
    state: float = 4.0

    def __post_init__(self) -> None:
        unknown = [shape for shape in self.placements if shape not in ("flat", "v", "looped")]
        if unknown or not self.placements:
            raise ConfigError(f"placements = {self.placements!r}; name at least one of 'flat', 'v', 'looped'")


@dataclass(frozen=True)
class AutoPlan:
    """A source of searched schedules for one placement: a function (ranks, microbatches) -> Schedule.

    Attributes:
        costs: the stages' times.
        placement: the rank of every stage.
        cuts: the number of blocks of every stage; None: as the partitioner cuts.
        limits: for each rank the most (stage, micro-batch) pairs that it keeps.
        semantics: the transport's message rules.
        effort: of a search.
        found: the schedules by their number of micro-batches.
    """

    costs: Costs
    placement: Placement
    cuts: tuple[int, ...] | None
    limits: tuple[int, ...]
    semantics: Semantics
    effort: int
    found: dict[int, Found] = field(default_factory=dict, compare=False)

    def __call__(self, ranks: int, microbatches: int) -> Schedule:
        """The schedule for a number of micro-batches."""
        return self.find(microbatches).schedule

    def find(self, microbatches: int) -> Found:
        """The same with its makespan and bound; searched the first time."""
        if microbatches not in self.found:
            self.found[microbatches] = self._search(microbatches)
        return self.found[microbatches]

    def _search(self, microbatches: int) -> Found:
        ranks = self.placement.num_ranks
        answer = search(
            self.costs,
            ranks,
            microbatches,
            placement=self.placement,
            limits=self.limits,
            semantics=self.semantics,
            effort=self.effort,
        )
        schedule = whole(answer.schedule, self.costs)
        program = lower(schedule, self.semantics)
        return Found(schedule, simulate(program, self.costs).makespan, answer.bound, program)

    def to_json(self) -> str:
        """As text; schedules are in pipert's text format."""
        found = [[count, dumps(each.schedule), each.makespan, each.bound] for count, each in self.found.items()]
        value = {"costs": asdict(self.costs), "placement": self.placement.owners, "limits": self.limits}
        return json.dumps({**value, "cuts": self.cuts, "effort": self.effort, "found": found})

    @classmethod
    def from_json(cls, text: str, semantics: Semantics) -> AutoPlan:
        """Read what `to_json` wrote."""
        data = json.loads(text)
        costs, placement = Costs(**data["costs"]), Placement.of(data["placement"])
        cuts = None if data["cuts"] is None else tuple(data["cuts"])
        plan = cls(costs, placement, cuts, tuple(data["limits"]), semantics, data["effort"])
        for count, written, makespan, bound in data["found"]:
            schedule = loads(written)
            assert isinstance(schedule, Schedule)
            plan.found[count] = Found(schedule, makespan, bound)
        return plan


def limits_of(partition: Partition, placement: Placement, options: AutoOptions) -> tuple[int, ...]:
    """For each rank how many (stage, micro-batch) pairs it may keep.

    Raises:
        ConfigError: a rank has too little memory for one micro-batch, or activations are not known.
    """
    ranks = placement.num_ranks
    by_memory = _each("memory", options.memory, ranks)
    in_flight = _each("in_flight", options.in_flight, ranks)
    if by_memory is None and in_flight is None:
        in_flight = [ranks] * ranks
    limits = []
    for rank in range(ranks):
        stages = [partition.stages[stage] for stage in placement.stages_of(rank)]
        limit = MICROBATCH_MASK
        if in_flight is not None:
            limit = in_flight[rank] * len(stages)
        if by_memory is not None:
            limit = min(limit, _within(stages, by_memory[rank], rank, options.state))
        limits.append(limit)
    return tuple(limits)


def _within(stages: Sequence[Stage], memory: int, rank: int, state: float) -> int:
    """How many activations fit beside the weights; each counts as the largest."""
    kept = [stage.activation_bytes for stage in stages if stage.activation_bytes is not None]
    if len(kept) < len(stages):
        raise ConfigError("memory limits need each block's activations; pass example= to Pipeline, or use in_flight")
    weights = round(state * sum(stage.parameter_bytes for stage in stages))
    if weights + len(kept) * max(kept) > memory:
        raise ConfigError(
            f"memory = {memory:,} bytes on rank {rank}, but its parameters take {weights:,} ({state:g} bytes for each "
            f"of theirs) and one micro-batch's activations {len(kept) * max(kept):,}; allow more, or use smaller "
            "micro-batches"
        )
    return (memory - weights) // max(1, *kept)


def _each(name: str, value: int | Sequence[int] | None, ranks: int) -> list[int] | None:
    if value is None:
        return None
    each = [value] * ranks if isinstance(value, int) else list(value)
    if len(each) != ranks or not all(isinstance(one, int) and not isinstance(one, bool) and one >= 1 for one in each):
        raise ConfigError(f"{name} = {value!r} for {ranks} ranks; give one integer >= 1, or one for each rank")
    return each
