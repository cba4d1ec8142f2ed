"""Lowering: from a schedule to the program that runs it on a transport, by passes from program to program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from pipert.scheduler.errors import LayoutError, ScheduleError, SemanticsError
from pipert.scheduler.index import flatten, usable_actions
from pipert.scheduler.lower.gathers import add_gathers
from pipert.scheduler.lower.groups import group_exchanges
from pipert.scheduler.lower.meta import add_sizes
from pipert.scheduler.lower.offload import add_offloads
from pipert.scheduler.lower.prefetch import prefetch_receives
from pipert.scheduler.lower.reductions import add_reductions
from pipert.scheduler.lower.scatters import add_scatters
from pipert.scheduler.lower.sends import add_messages
from pipert.scheduler.lower.trainable import drop_frozen
from pipert.scheduler.lower.updates import add_steps
from pipert.scheduler.lower.vocabulary import spread_vocabulary
from pipert.scheduler.program import Program
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.semantics import NAMED, Semantics
from pipert.scheduler.vocabulary import Vocabulary


def lower(
    schedule: Schedule,
    semantics: Semantics,
    *,
    trainable_from: int = 0,
    ties: Sequence[Sequence[int]] = (),
    reduce: bool = False,
    meta: Iterable[int] = (),
    prefetch: int = 1,
    vocabulary: Vocabulary | None = None,
    zero: int = 0,
    alike: bool = True,
    early: bool = False,
    offload: Mapping[int, int] | None = None,
) -> Program:
    """Write down every message and reduction of a schedule, in an order that is safe on a transport.

    If the schedule can run at all, the program can run on any transport with these semantics: nothing deadlocks, and no
    two messages are swapped.

    Args:
        schedule: who computes what in which order.
        semantics: the transport's message rules.
        trainable_from: the first stage with anything to train; those below have no backward and get no gradient.
            The number of stages means forward only.
        ties: for every tied weight the stages that hold a copy.
        reduce: whether gradients are summed over data-parallel replicas.
        meta: the micro-batches whose sizes travel ahead of their forward messages.
        prefetch: how many computations before its own each receive may be posted; at most so many more receive buffers
            are live at any time.
        vocabulary: embedding and head are spread over all ranks. (Give the schedule a lag of two or so before, with
            `delay_backwards`: then computing goes on while the ranks exchange what the loss needs.)
        zero: the ZeRO stage over the replicas. From 2 on every micro-batch's gradients are summed at once (SCATTER
            instead of REDUCE), at 3 weights are gathered before they are used (GATHER, FREE).
        alike: all replicas have as many micro-batches. If not, what replicas do together stands at the beginning and
            the end, where its order does not depend on that: there is one REDUCE and one GATHER of each stage.
        early: each stage is updated as soon as its gradients are whole (STEP).
        offload: for stages that move activations to host memory how many micro-batches stay on the device.

    Raises:
        LayoutError: an argument is out of range.
        SemanticsError: `semantics` is something else, such as a name.
        ScheduleError: this is a program already, or the schedule has an action that is no computation, is out of range,
            or stands on a rank that does not own its stage.
    """
    _check_arguments(schedule, semantics, trainable_from, prefetch)
    if zero not in range(4) or (zero and not reduce):
        raise LayoutError(f"zero = {zero} must be 0 .. 3, and above 0 there are replicas: reduce = True")
    if zero >= 2 and vocabulary is not None:
        raise LayoutError(f"zero = {zero} with a vocabulary that is spread over the ranks; use zero = 1")
    _check(schedule)
    copies = tuple(map(tuple, ties))
    program = Program(
        schedule, semantics, schedule.rows, trainable_from=trainable_from, ties=copies, vocabulary=vocabulary
    )
    program, order = drop_frozen(program), None
    if vocabulary is not None:
        program, order = spread_vocabulary(program)
    program = add_messages(program, order)
    program = add_sizes(program, meta)
    program = prefetch_receives(program, prefetch)
    program = replace(program, zero=zero)
    scatter = zero >= 2 and alike
    program = add_scatters(program) if scatter else program
    program = add_reductions(program, reduce and not scatter)
    program = add_gathers(program, once=not alike) if zero == 3 else program
    program = add_steps(program, at_end=not alike) if early else program
    program = add_offloads(program, offload or {})
    return group_exchanges(program)


def _check_arguments(schedule: Schedule, semantics: Semantics, trainable_from: int, prefetch: int) -> None:
    """Refuse what is no schedule, no transport, or out of range."""
    if isinstance(schedule, Program):
        raise ScheduleError("this is a program, so it has been lowered before; lower its schedule, program.schedule")
    if not isinstance(semantics, Semantics):
        raise SemanticsError(
            f"semantics = {semantics!r:.60} is not a Semantics; semantics.NAMED has them by name: {', '.join(NAMED)}"
        )
    if not 0 <= trainable_from <= schedule.num_stages:
        raise LayoutError(f"trainable_from = {trainable_from} must be in 0 .. {schedule.num_stages}, the stages")
    if prefetch < 0:
        raise LayoutError(f"prefetch = {prefetch} must be >= 0")


def _check(schedule: Schedule) -> None:
    """Refuse a schedule that the passes cannot index."""
    if len(schedule.rows) != schedule.placement.num_ranks:
        ranks = schedule.placement.num_ranks
        raise ScheduleError(f"{len(schedule.rows)} rows for a placement on {ranks} ranks; give each rank one row")
    codes, offsets = flatten(schedule.rows)
    wrong = np.flatnonzero(~usable_actions(codes, offsets, schedule))
    if len(wrong):
        rank = int(np.searchsorted(offsets, wrong[0], side="right")) - 1
        place = int(wrong[0] - offsets[rank])
        action, own = schedule.rows[rank][place], schedule.placement.stages_of(rank)
        raise ScheduleError(
            f"rank {rank}, action {place}: {action} cannot be lowered; a row holds computations of the rank's own "
            f"stages {own} for micro-batches 0 .. {schedule.microbatches - 1}"
        )
