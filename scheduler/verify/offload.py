"""The rule about activations in host memory: they are back when their backward begins."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipert.scheduler.action import Action, Kind
from pipert.scheduler.verify.fault import Fault
from pipert.scheduler.verify.rule import Rule, Subject, where
from pipert.scheduler.verify.words import count


def _faults(subject: Subject) -> Iterator[Fault]:
    index = subject.index
    if subject.program is None or not (index.has(Kind.OFFLOAD) or index.has(Kind.RELOAD)):
        return
    forward, out, back = (index.table(kind) for kind in (Kind.F, Kind.OFFLOAD, Kind.RELOAD))
    whole, half = index.table(Kind.B), index.table(Kind.I)
    backward = np.where(whole >= 0, whole, half)
    for stage, microbatch in where((out >= 0) | (back >= 0)):
        chain = [int(table[stage, microbatch]) for table in (forward, out, back, backward)]
        yield from _broken(subject, stage, microbatch, chain)


def _broken(subject: Subject, stage: int, microbatch: int, chain: list[int]) -> Iterator[Fault]:
    """Where forward, OFFLOAD, RELOAD and backward of a micro-batch do not follow one another."""
    forward, out, back, backward = chain
    offload, reload = Action(stage, Kind.OFFLOAD, microbatch), Action(stage, Kind.RELOAD, microbatch)
    if out < 0 or back < 0:
        absent, there = (offload, reload) if out < 0 else (reload, offload)
        text = f"the activations of {Action(stage, Kind.F, microbatch)} are moved by {there} and never by {absent}"
        yield subject.missing("offload", absent, text)
        return
    if backward < 0:
        yield subject.at("offload", out, f"stage {stage} keeps nothing of micro-batch {microbatch}: it has no backward")
        return
    for early, late in ((forward, out), (out, back), (back, backward)):
        if early > late:
            text = f"stands before {subject.place(early)}; activations are made, moved out, brought back and used"
            yield subject.at("offload", late, text, [early])


def _describe(subject: Subject) -> str:
    moves = int(np.count_nonzero(subject.index.table(Kind.OFFLOAD) >= 0))
    if not moves:
        return "no activations are moved to host memory"
    return f"{count(moves, 'micro-batch')} of activations go to host memory, and are back before their backward"


OFFLOAD_RULE = Rule("offload", _faults, _describe)
