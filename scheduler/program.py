"""Program: a schedule lowered for a transport, with every message and reduction written down."""

from __future__ import annotations

from dataclasses import dataclass

from pipert.scheduler.action import Action
from pipert.scheduler.placement import Placement
from pipert.scheduler.row import ActionRow
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.semantics import Semantics
from pipert.scheduler.vocabulary import Vocabulary

Span = tuple[int, int]


@dataclass(frozen=True)
class Program:
    """For every rank all its actions in order: compute, messages, reductions.

    Like a `Schedule` it is a plain value that may be wrong. The executor runs exactly this and decides nothing.
    A message is posted where it stands; a compute action waits for the messages that feed it.

    Attributes:
        schedule: the schedule it was lowered from.
        semantics: the transport's message rules it was lowered for.
        rows: one `ActionRow` a rank.
        groups: for every rank the spans ``[start, stop)`` of its row whose messages are issued as one group; empty if
            no rank has one.
        trainable_from: stages below this one have no trainable weight: no backward there, and no gradient goes down to
            them. ``num_stages`` means forward only (evaluation).
        ties: for every group of tied weights the stages that hold a copy.
        vocabulary: embedding and head are spread over all ranks; None where they are blocks of stages.
        zero: the ZeRO stage over the replicas (Rajbhandari et al. 2020). From 1 on, what a STEP updates is this
            replica's shard, and a GATHER behind it fetches the others' shards; at 3 weights live as shards, and every
            computation stands between a GATHER and a FREE.

    A program of no micro-batches is an update alone: it has no computations, only NORM, STEP, GATHER and UNDO.
    """

    schedule: Schedule
    semantics: Semantics
    rows: tuple[ActionRow, ...]
    groups: tuple[tuple[Span, ...], ...] = ()
    trainable_from: int = 0
    ties: tuple[tuple[int, ...], ...] = ()
    vocabulary: Vocabulary | None = None
    zero: int = 0

    def __post_init__(self) -> None:
        if self.groups and not any(self.groups):  # one spelling of "no groups", so that equal programs compare equal
            object.__setattr__(self, "groups", ())

    def spans(self, rank: int) -> tuple[Span, ...]:
        """The groups of one rank."""
        return self.groups[rank] if self.groups else ()

    @property
    def placement(self) -> Placement:
        """The rank of every stage."""
        return self.schedule.placement

    @property
    def microbatches(self) -> int:
        """The number of micro-batches of a step."""
        return self.schedule.microbatches

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self.rows)

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return self.schedule.num_stages

    def peer(self, message: Action) -> int:
        """The rank at the other end of a message."""
        return self.placement.owners[message.counterpart.stage]
