"""Which pairs of ranks get communicators in which order, and whether the GPU can run their queues at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

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


def most_lanes(pairs: Iterable[Pair]) -> int:
    """How many of these pairs the rank is in that is in most of them."""
    counts = Counter(rank for pair in pairs for rank in pair)
    return max(counts.values(), default=0)


def check_queues(lanes: int, environ: Mapping[str, str], hip: bool) -> None:
    """Refuse more message queues than the GPU runs at once.

    Streams beyond that number share a hardware queue, where one waits behind another although no program says so: an
    order that was proved safe could hang.

    Args:
        lanes: streams of messages on a rank; computations and collectives have one each besides.
        environ: where the number is looked up.
        hip: whether this is ROCm.

    Raises:
        TransportError: there are too few.
    """
    name, usual = ("GPU_MAX_HW_QUEUES", 4) if hip else ("CUDA_DEVICE_MAX_CONNECTIONS", 8)
    text = environ.get(name, "")
    queues = int(text) if text.isdigit() else usual
    if lanes + 2 > queues:
        raise TransportError(
            f"{lanes} streams for messages, and one each for computing and for collectives, but the GPU runs {queues} "
            "queues at once, so messages could wait for each other for ever; set "
            f"{name}={max(8, lanes + 2)} before the job starts"
        )
