"""Run a schedule or a wired program in time, without side effects: the worklists with their arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipert.scheduler.action import Kind
from pipert.scheduler.compiled import compiled
from pipert.scheduler.dependencies import MAKES, NEEDS, ValueKind, makes_table, needs_table
from pipert.scheduler.wiring import Wiring
from pipert.scheduler.worklist import WAITING, Ints, Seconds, play_program, play_schedule


@dataclass(frozen=True, eq=False)
class PlayedSchedule:
    """What happens when a schedule's actions run.

    Attributes:
        begins: when each action starts, seconds ``[actions]``; negative if it never does.
        ends: when it ends, likewise.
        ready: when each value is there, ``[value kinds, stages, micro-batches]``, likewise.
        cursors: the position that each rank got to.
        missing: for each rank the number of the value it waits for, or −1.
    """

    begins: Seconds
    ends: Seconds
    ready: Seconds
    cursors: Ints
    missing: Ints

    @property
    def finished(self) -> bool:
        """Whether everything happened."""
        return bool((self.missing < 0).all())


@dataclass(frozen=True, eq=False)
class PlayedProgram:
    """What happens when a program runs.

    Attributes:
        begins: when each compute action or operation starts, seconds ``[actions]``.
        ends: when it is complete; negative if it never is.
        cursors: the position that each rank got to.
        blocked: for each rank the position of the operation it waits for, or −1.
    """

    begins: Seconds
    ends: Seconds
    cursors: Ints
    blocked: Ints

    @property
    def finished(self) -> bool:
        """Whether everything happened."""
        return bool((self.blocked < 0).all())


def run_schedule(
    codes: Ints,
    offsets: Ints,
    owners: Ints,
    microbatches: int,
    durations: Seconds,
    comm: Seconds,
    blocking: bool = False,
) -> PlayedSchedule:
    """Run compute actions, all in range: each starts when its rank is free and its needs are there.

    Args:
        codes: the packed actions of rank 0, then rank 1, … ``[actions]``.
        offsets: where each rank's row starts ``[ranks + 1]``.
        owners: the rank of every stage ``[stages]``.
        microbatches: the number of micro-batches.
        durations: seconds of an action, ``[kinds, stages]``.
        comm: seconds between a stage and the next if they are on different ranks, ``[stages]``.
        blocking: whether a hand-over to another rank also holds the rank that sends.
    """
    sending = _sending(owners, comm) if blocking else np.zeros_like(durations)
    played = PlayedSchedule(
        begins=np.full(len(codes), -1.0),
        ends=np.full(len(codes), -1.0),
        ready=np.full((len(ValueKind), len(owners), microbatches), -1.0),
        cursors=offsets[:-1].copy(),
        missing=np.full(len(offsets) - 1, -1, dtype=np.int64),
    )
    compiled(play_schedule, len(codes))(
        offsets,
        codes,
        owners,
        needs_table().reshape(-1),
        makes_table().reshape(-1),
        microbatches,
        np.ascontiguousarray(durations).reshape(-1),
        np.ascontiguousarray(sending).reshape(-1),
        comm,
        played.begins,
        played.ends,
        played.ready.reshape(-1),
        played.cursors,
        played.missing,
    )
    return played


def _sending(owners: Ints, comm: Seconds) -> Seconds:
    """Seconds for which an action that hands over to another rank then holds its own, ``[kinds, stages]``."""
    seconds = np.zeros((len(Kind), len(owners)))
    users = {need for entries in NEEDS.values() for need in entries if need[1] != 0}
    for kind, values in MAKES.items():
        for value, offset in users:
            for stage in range(max(offset, 0), len(owners) + min(offset, 0)) if value in values else ():
                if owners[stage - offset] != owners[stage]:
                    seconds[kind, stage] += comm[min(stage, stage - offset)]
    return seconds


def run_program(wiring: Wiring, durations: npt.NDArray[np.float64]) -> PlayedProgram:
    """Run a wired program; ``durations[kind, stage]`` in seconds."""
    index = wiring.index
    actions = len(index.codes)
    played = PlayedProgram(
        begins=np.zeros(actions),
        ends=np.full(actions, WAITING),
        cursors=index.offsets[:-1].copy(),
        blocked=np.full(len(index.offsets) - 1, -1, dtype=np.int64),
    )
    compiled(play_program, actions)(
        index.offsets,
        index.codes,
        index.owners,
        wiring.needs,
        wiring.also,
        wiring.ring,
        wiring.unit,
        wiring.behind,
        wiring.pending.copy(),
        np.ascontiguousarray(durations).reshape(-1),
        wiring.semantics.buffered,
        wiring.semantics.blocking,
        played.begins,
        played.ends,
        played.cursors,
        played.blocked,
    )
    for rank, (start, stop) in enumerate(zip(index.offsets[:-1], index.offsets[1:], strict=True)):
        if played.cursors[rank] == stop:  # through its row: whatever is not complete holds it at the end
            never = played.ends[start:stop] < 0
            played.blocked[rank] = start + np.argmax(never) if never.any() else -1
    return played
