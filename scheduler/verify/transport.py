"""Rules about the transport: no message reaches the wrong receive, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipert.scheduler.action import Kind
from pipert.scheduler.play import run_program, run_schedule
from pipert.scheduler.row import distinct
from pipert.scheduler.verify.fault import Fault
from pipert.scheduler.verify.rule import Rule, Subject
from pipert.scheduler.verify.words import count
from pipert.scheduler.waits import Deadlock, program_deadlock, schedule_deadlock
from pipert.scheduler.wiring import counterparts, messages, wire


def _swapped(subject: Subject) -> Iterator[Fault]:
    """Messages that an order-matched transport would hand to the wrong receive."""
    index, program = subject.index, subject.program
    if program is None or program.semantics.matching != "order":
        return
    rows = [messages(index, rank) for rank in range(program.num_ranks)]
    for rank, row in enumerate(rows):
        for peer in distinct(row.peers[row.sends]).tolist():
            sends, receives = row.to(peer), rows[peer].source(rank)
            for turn in np.flatnonzero(counterparts(index.codes[sends]) != index.codes[receives]).tolist():
                sent, received = int(sends[turn]), int(receives[turn])
                text = (
                    f"message {turn} from rank {rank} to rank {peer} is {subject.place(sent)}, but the receive that "
                    f"gets it is {subject.place(received)}: {program.semantics.name} matches by order"
                )
                yield subject.at("swap", received, text, (sent, received))


def _deadlocked(subject: Subject) -> Iterator[Fault]:
    """The shortest cycle of waits, if there is one."""
    deadlock = _deadlock(subject)
    if deadlock is not None:
        yield subject.at("deadlock", deadlock.positions[0], deadlock.words, deadlock.positions)


def _deadlock(subject: Subject) -> Deadlock | None:
    index, program = subject.index, subject.program
    nothing = np.zeros((len(Kind), index.num_stages))
    if program is None:
        played = run_schedule(index.codes, index.offsets, index.owners, index.microbatches, nothing, nothing[0])
        return None if played.finished else schedule_deadlock(index, played)
    wiring = wire(index, program)
    run = run_program(wiring, nothing)
    return None if run.finished else program_deadlock(wiring, run)


def _describe_swap(subject: Subject) -> str:
    program = subject.program
    if program is None or program.semantics.matching == "tag":
        return "messages are matched by tag, so none can reach another's receive"
    return "between any two ranks, messages are received in the order in which they are sent"


def _describe_deadlock(subject: Subject) -> str:
    program = subject.program
    if program is None:
        return "no cyclic wait between ranks"
    grouped = sum(map(len, program.groups))
    return f"every action happens under {program.semantics.name}: {program.semantics.describe()}" + (
        f", {count(grouped, 'group')}" if grouped else ""
    )


SWAP = Rule("swap", _swapped, _describe_swap)
DEADLOCK = Rule("deadlock", _deadlocked, _describe_deadlock)
