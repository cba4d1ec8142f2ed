"""Memory and times of a schedule by their definitions: plain loops, nothing of the simulator or of packed codes."""

from __future__ import annotations

from pipert.scheduler.action import Kind
from pipert.scheduler.schedule import Schedule


def peaks(schedule: Schedule) -> list[int]:
    """For each rank the most (stage, micro-batch) pairs between their forward and the end of their backward."""
    found = []
    for row in schedule.rows:
        live: set[tuple[int, int]] = set()
        most = 0
        for stage, kind, microbatch in row:
            if kind is Kind.F:
                live.add((stage, microbatch))
            elif kind in (Kind.B, Kind.W):
                live.remove((stage, microbatch))
            most = max(most, len(live))
        assert not live
        found.append(most)
    return found


def idle(schedule: Schedule, seconds: dict[Kind, float], hop: float = 0) -> tuple[list[float], list[float]]:
    """For each rank the time without work: in the whole step, and between its own first and last action.

    Args:
        schedule: that can run to its end.
        seconds: of every kind, at every stage.
        hop: of a message between two ranks.
    """
    owners, last = schedule.placement.owners, schedule.num_stages - 1
    ends: dict[tuple[int, Kind, int], float] = {}
    clocks, firsts, at = [0.0] * schedule.num_ranks, [-1.0] * schedule.num_ranks, [0] * schedule.num_ranks
    rows = [list(row) for row in schedule.rows]

    def arrival(rank: int, stage: int, kind: Kind, microbatch: int) -> float | None:
        """When what the action needs of another is there; None if that is not done."""
        if kind is Kind.F and stage > 0:
            before, made = stage - 1, ends.get((stage - 1, Kind.F, microbatch))
        elif kind in (Kind.B, Kind.I) and stage < last:
            before, made = stage + 1, ends.get((stage + 1, Kind.I, microbatch))
        else:
            return 0.0
        return None if made is None else made + (hop if owners[before] != rank else 0)

    while any(at[rank] < len(rows[rank]) for rank in range(len(rows))):
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                stage, kind, microbatch = row[at[rank]]
                there = arrival(rank, stage, kind, microbatch)
                if there is None:
                    break
                begin = max(clocks[rank], there)
                firsts[rank] = begin if at[rank] == 0 else firsts[rank]
                clocks[rank] = begin + seconds[kind]
                ends[stage, Kind.I if kind is Kind.B else kind, microbatch] = clocks[rank]
                at[rank] += 1
    work = [sum(seconds[kind] for _, kind, _ in row) for row in rows]
    whole = [max(clocks) - busy for busy in work]
    return whole, [clock - first - busy for clock, first, busy in zip(clocks, firsts, work, strict=True)]
