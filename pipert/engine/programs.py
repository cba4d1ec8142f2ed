"""Programs on demand: generated, lowered, proved and kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pipert.engine.auto import AutoPlan
from pipert.errors import BatchError, ConfigError
from pipert.scheduler.action import Action, Kind
from pipert.scheduler.generators.registry import generate
from pipert.scheduler.lower import lower
from pipert.scheduler.lower.delay import delay_backwards
from pipert.scheduler.lower.updates import update_program
from pipert.scheduler.placement import Placement
from pipert.scheduler.program import Program
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.semantics import Semantics
from pipert.scheduler.verify import Proof, verify
from pipert.scheduler.vocabulary import Vocabulary

#: With a spread vocabulary: forwards between a micro-batch's own and its backward, on top of the schedule's.
LAG = 2

#: How many micro-batches stay on the device in every stage, or for some stages by number; None: all.
Offload = int | Mapping[int, int] | None
#: A schedule's name, a schedule, or a function from (ranks, micro-batches) to one.
ScheduleSource = str | Schedule | Callable[[int, int], Schedule]


@dataclass(frozen=True)
class ProgramKey:
    """What a program depends on, beside the schedule and the transport.

    Attributes:
        microbatches: how many.
        trainable_from: the first stage with a backward; the number of stages for an evaluation.
        sizes: whether sizes travel ahead of the forward messages.
        ties: for each trainable tied weight the stages that hold a copy.
        zero: the ZeRO stage.
        alike: whether all replicas have as many micro-batches.
        early: whether each stage is updated as soon as its gradients are whole.
        vocabulary: what is trained of a spread vocabulary; None where it is not spread.
    """

    microbatches: int
    trainable_from: int
    sizes: bool = False
    ties: tuple[tuple[int, ...], ...] = ()
    zero: int = 0
    alike: bool = True
    early: bool = False
    vocabulary: Vocabulary | None = None


class Programs:
    """Makes and proves programs for one pipeline, and keeps the last ones.

    Args:
        source: where schedules come from.
        ranks: pipeline ranks.
        microbatches: the usual number.
        chunks: stages a rank, for schedules by name.
        semantics: the transport's message rules.
        reduce: whether gradients are summed over replicas.
        offload: how many micro-batches of each stage stay on the device, or for which stages; None: all.
        spread: whether the vocabulary is spread over all ranks. Then backwards come `LAG` forwards later, for the ranks
            need that time to compute a micro-batch's loss together.
        capacity: how many programs are kept.

    Attributes:
        placement: the rank of every stage; all programs have this one.
        name: the schedule's name.
    """

    def __init__(
        self,
        source: ScheduleSource,
        ranks: int,
        microbatches: int,
        chunks: int,
        semantics: Semantics,
        reduce: bool,
        offload: Offload = None,
        spread: bool = False,
        capacity: int = 64,
    ) -> None:
        self._source, self._ranks, self._chunks = source, ranks, chunks
        self._semantics, self._reduce, self._spread, self._capacity = semantics, reduce, spread, capacity
        self._proofs: OrderedDict[ProgramKey, Proof] = OrderedDict()
        self._updates: dict[tuple[tuple[Kind, ...], int], Program] = {}
        first = self._generate(microbatches)
        if first.placement.num_ranks != ranks:
            raise ConfigError(
                f"the schedule {first.name} is for {first.placement.num_ranks} ranks, but pp = {ranks}; use a "
                f"schedule for {ranks} ranks"
            )
        self.placement: Placement = first.placement
        self._offload = kept_by_stage(offload, first.placement.num_stages)
        self.name = first.name

    def proof(self, key: ProgramKey) -> Proof:
        """The proof of the program for a key.

        Raises:
            UnsafeProgramError: the program is not safe; the message is the picture.
            ScheduleError: the schedule cannot be lowered.
            BatchError: the schedule is for another number of micro-batches.
        """
        if key not in self._proofs:
            self._proofs[key] = verify(self._lower(key)).require()
            while len(self._proofs) > self._capacity:
                self._proofs.popitem(last=False)
        self._proofs.move_to_end(key)
        return self._proofs[key]

    def program(self, key: ProgramKey) -> Program:
        """The proved program for a key; raises as `proof`."""
        program = self.proof(key).target
        assert isinstance(program, Program)
        return program

    def schedule(self, microbatches: int) -> Schedule:
        """The schedule for a number of micro-batches."""
        schedule = self._generate(microbatches)
        return delay_backwards(schedule, LAG) if self._spread else schedule

    def _lower(self, key: ProgramKey) -> Program:
        evaluation = key.trainable_from == self.placement.num_stages
        if evaluation and not self._has(key.microbatches):
            schedule = forward_schedule(self.placement, key.microbatches)
        else:
            schedule = self.schedule(key.microbatches)
        if schedule.placement != self.placement:
            raise ConfigError(
                f"the schedule for {key.microbatches} micro-batches places the stages on ranks "
                f"{schedule.placement}, the model was built for {self.placement}; a schedule function must not "
                "change the placement"
            )
        return lower(
            schedule,
            self._semantics,
            trainable_from=key.trainable_from,
            ties=key.ties,
            reduce=self._reduce or key.early,
            meta=range(key.microbatches) if key.sizes else (),
            prefetch=0 if key.sizes else 1,
            zero=key.zero,
            alike=key.alike,
            early=key.early,
            offload=self._offload,
            vocabulary=key.vocabulary,
        )

    def update(self, parts: tuple[Kind, ...], zero: int) -> Program:
        """The proved program of an update alone; see `update_program`."""
        key = parts, zero
        if key not in self._updates:
            program = update_program(self.placement, self._semantics, parts, zero=zero)
            verify(program).require()
            self._updates[key] = program
        return self._updates[key]

    def _has(self, microbatches: int) -> bool:
        """Whether there is a schedule for so many micro-batches without a search, which no evaluation is worth."""
        if self.plan is not None:
            return microbatches in self.plan.found
        return not isinstance(self._source, Schedule) or self._source.microbatches == microbatches

    @property
    def plan(self) -> AutoPlan | None:
        """Where schedules come from, if they are searched for."""
        return self._source if isinstance(self._source, AutoPlan) else None

    def replace(self, source: ScheduleSource) -> None:
        """From now on schedules come from elsewhere; they have the same placement."""
        self._source, self._chunks = source, 1
        self._proofs.clear()

    def _generate(self, microbatches: int) -> Schedule:
        if isinstance(self._source, str):
            return generate(self._source, self._ranks, microbatches, self._chunks)
        if self._chunks != 1:
            raise ConfigError(
                f"chunks = {self._chunks} goes with schedules by name; this schedule has its own placement"
            )
        if callable(self._source):
            schedule = self._source(self._ranks, microbatches)
            if not isinstance(schedule, Schedule) or schedule.microbatches != microbatches:
                raise ConfigError(
                    f"the schedule function returned {schedule!r:.80} for {microbatches} micro-batches; it must "
                    "return a Schedule for as many as it was asked for"
                )
            return schedule
        if not isinstance(self._source, Schedule):
            raise ConfigError(
                f"schedule = {self._source!r:.80} is none; use a name such as '1f1b', a Schedule, or a function "
                "(ranks, microbatches) -> Schedule"
            )
        if self._source.microbatches != microbatches:
            raise BatchError(
                f"the schedule {self._source.name} is for {self._source.microbatches} micro-batches, not "
                f"{microbatches}; use a schedule's name or a function (ranks, microbatches) -> Schedule for "
                "other numbers"
            )
        return self._source


def kept_by_stage(offload: Offload, stages: int) -> dict[int, int]:
    """For each stage that moves activations to host memory how many micro-batches stay on the device.

    Raises:
        ConfigError: there is no such stage, or less than one micro-batch stays.
    """
    keep = (
        {}
        if offload is None
        else dict(offload if isinstance(offload, Mapping) else dict.fromkeys(range(stages), offload))
    )
    for stage, number in keep.items():
        if stage not in range(stages) or isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ConfigError(
                f"offload = {offload!r:.80}: give how many micro-batches stay on the device (1 or more) for all "
                f"stages, or as {{stage: number}} for some of the stages 0 to {stages - 1}"
            )
    return keep


def forward_schedule(placement: Placement, microbatches: int) -> Schedule:
    """Forwards alone, for any placement: micro-batches in groups of the number of ranks, stage by stage."""
    group = placement.num_ranks
    order = sorted(
        ((stage, microbatch) for stage in range(placement.num_stages) for microbatch in range(microbatches)),
        key=lambda pair: (pair[1] // group, pair[0], pair[1]),
    )
    rows = ([Action(s, Kind.F, m) for s, m in order if placement.owners[s] == rank] for rank in range(group))
    return Schedule.of("forward", placement, microbatches, rows)
