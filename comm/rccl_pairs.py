"""Which pairs of ranks get communicators in which order, and whether the GPU can run all streams at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from pipert.comm.errors import TransportError

Pair = tuple[int, int]


def rounds(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Spread pairs over rounds, so that no rank is twice in one: each round is one division of all ranks.

    The neighbours in a pipeline take two rounds, closed to a ring of odd length three, however many there are.
    """
    result: list[list[Pair]] = []
    for pair in sorted(set(pairs)):
        free = (each for each in result if not any(set(pair) & set(other) for other in each))
        place = next(free, None)
        if place is None:
            result.append(place := [])
        place.append(pair)
    return result


class Queues(NamedTuple):
    """How many queues a GPU runs at once, and the variable that says so."""

    variable: str
    number: int


def queues_of(device: torch.device, environ: Mapping[str, str], hip: bool) -> Queues | None:
    """The queues of a device; None where there is no such limit, as on the CPU.

    Args:
        device: where operations run.
        environ: where the number is looked up.
        hip: whether this is ROCm.
    """
    if device.type != "cuda":
        return None
    name, usual = ("GPU_MAX_HW_QUEUES", 4) if hip else ("CUDA_DEVICE_MAX_CONNECTIONS", 8)
    text = environ.get(name, "")
    return Queues(name, int(text) if text.isdigit() else usual)


def check_queues(messages: int, groups: int, queues: Queues) -> None:
    """Refuse more streams than the GPU runs at once.

    Streams beyond that number share a hardware queue, where one waits behind another although no program says so: an
    order that was proved safe could hang.

    Args:
        messages: streams of messages on a rank.
        groups: those of collectives.
        queues: what the GPU has.

    Raises:
        TransportError: there are too few.
    """
    streams = messages + groups + 1
    if streams > queues.number:
        raise TransportError(
            f"{messages} streams for messages, {groups} for collectives of groups and one for computing, but the GPU "
            f"runs {queues.number} queues at once, so they could wait for each other for ever; set "
            f"{queues.variable}={max(8, streams)} before the job starts"
        )
