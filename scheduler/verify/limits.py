"""The rule about memory: no rank keeps more activations than it may."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pipert.scheduler.live import live_changes
from pipert.scheduler.verify.fault import Fault
from pipert.scheduler.verify.rule import Rule, Subject


def _over_limit(subject: Subject) -> Iterator[Fault]:
    index = subject.index
    for rank, limit in enumerate(subject.limits or ()):
        start, stop = index.offsets[rank], index.offsets[rank + 1]
        live = np.cumsum(live_changes(index.codes[start:stop], index.trainable_from))
        over = np.flatnonzero(live > limit)
        if len(over):
            text = (
                f"{live[over[0]]} micro-batches are live on rank {rank} from here on, its limit is {limit} "
                f"(peak {live.max()})"
            )
            yield subject.at("limit", int(start + over[0]), text)


def peaks(subject: Subject) -> list[int]:
    """The most micro-batches that are live at once on each rank."""
    index = subject.index
    changes = live_changes(index.codes, index.trainable_from)
    bounds = zip(index.offsets[:-1], index.offsets[1:], strict=True)
    return [int(np.cumsum(changes[start:stop]).max(initial=0)) for start, stop in bounds]


def _describe(subject: Subject) -> str:
    return f"at most {_each(peaks(subject))} micro-batches live per rank, allowed {_each(subject.limits or ())}"


def _each(numbers: Sequence[int]) -> str:
    """One number if all are equal, else the list (its middle left out if long)."""
    if len(set(numbers)) == 1:
        return str(numbers[0])
    texts = [str(number) for number in numbers]
    return ", ".join(texts if len(texts) <= 16 else [*texts[:8], "…", *texts[-8:]])


LIMIT = Rule("limit", _over_limit, _describe)
