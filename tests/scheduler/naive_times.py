"""When everything happens, by the definition: go over all events again and again until no time changes any more.

Times are the least that satisfy "not before" rules, so sweeping from zero upwards ends at them. Independent of the
simulator: no worklist, no packed codes, its own copy of the rules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from pipert.scheduler.action import Action, Kind
from pipert.scheduler.program import Program
from pipert.scheduler.schedule import Schedule

#: Start and end of every (rank, index in row).
Times = dict[tuple[int, int], tuple[float, float]]
Durations = Mapping[tuple[Kind, int], float]

SENDS = {Kind.SEND_F: (Kind.RECV_F, 1), Kind.SEND_B: (Kind.RECV_B, -1), Kind.SEND_META: (Kind.RECV_META, 1)}
MOVES = (Kind.OFFLOAD, Kind.RELOAD)
RECEIVES = {receive: send for send, (receive, _) in SENDS.items()}
SUMS = (Kind.REDUCE, Kind.TIE, Kind.SCATTER)
LOCAL = (Kind.FREE, Kind.STEP, Kind.UNDO)
FEEDS = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B}


def schedule_times(schedule: Schedule, durations: Durations, comm: list[float], blocking: bool = False) -> Times:
    """Each action after the one before it on its rank, and after what it needs (``comm[s]`` is between s and s + 1)."""
    owners, last = schedule.placement.owners, schedule.num_stages - 1
    where = {action: (rank, at) for rank, row in enumerate(schedule.rows) for at, action in enumerate(row)}
    ends = dict.fromkeys(where, 0.0)

    def made(stage: int, kinds: tuple[Kind, ...], batch: int, by: int) -> float:
        end = max(ends.get(Action(stage, kind, batch), 0.0) for kind in kinds)
        return end + (comm[min(stage, by)] if owners[stage] != owners[by] else 0.0)

    def holds(action: Action) -> float:
        """How long the rank is held after the action, because it sends."""
        stage, kind, _ = action
        to = stage + 1 if kind is Kind.F else stage - 1
        crosses = kind is not Kind.W and 0 <= to <= last and owners[to] != owners[stage]
        return comm[min(stage, to)] if blocking and crosses else 0.0

    starts: dict[Action, float] = {}
    changed = True
    while changed:
        changed = False
        for row in schedule.rows:
            free = 0.0
            for action in row:
                stage, kind, batch = action
                start = free
                if kind is Kind.F and stage > 0:
                    start = max(start, made(stage - 1, (Kind.F,), batch, stage))
                if kind in (Kind.B, Kind.I) and stage < last:
                    start = max(start, made(stage + 1, (Kind.B, Kind.I), batch, stage))
                end = start + durations[kind, stage]
                changed |= end != ends[action] or starts.get(action) != start
                starts[action], ends[action] = start, end
                free = end + holds(action)
    return {where[action]: (starts[action], ends[action]) for action in where}


def program_times(program: Program, durations: Durations) -> Times:
    """Each event after those that the docstring of `Semantics` names."""
    return _Sweeps(program, durations).run()


class _Sweeps:
    def __init__(self, program: Program, durations: Durations) -> None:
        self.program, self.rules, self.durations = program, program.semantics, durations
        self.rows = [list(row) for row in program.rows]
        self.at = {action: (rank, i) for rank, row in enumerate(self.rows) for i, action in enumerate(row)}
        self.group = {(rank, i): (i, i + 1) for rank, row in enumerate(self.rows) for i in range(len(row))}
        for rank in range(len(self.rows)):
            for start, stop in program.spans(rank):
                self.group.update({(rank, i): (start, stop) for i in range(start, stop)})
        self.ahead = self.queues()
        self.start = dict.fromkeys(self.group, 0.0)
        self.end = dict.fromkeys(self.group, 0.0)

    def queues(self) -> dict[tuple[int, int], list[int]]:
        """For each message the indices of those before it in its queue and not in its group."""
        owners, ahead = self.program.placement.owners, {}
        for rank, row in enumerate(self.rows):
            queues = defaultdict(list)
            for i, action in enumerate(row):
                if action.kind in MOVES:
                    ahead[rank, i] = list(queues[action.kind])
                    queues[action.kind].append(i)
                if action.kind.is_message:
                    peer = owners[action.counterpart.stage]
                    names = {"message": i, "pair": peer, "direction": (peer, action.kind in SENDS), "rank": 0}
                    queue = queues[names[self.rules.channel]]
                    ahead[rank, i] = [j for j in queue if j < self.group[rank, i][0]]
                    queue.append(i)
        return ahead

    def run(self) -> Times:
        before = None
        while before != (before := (dict(self.start), dict(self.end))):
            for rank in range(len(self.rows)):
                self.sweep(rank)
        return {place: (self.start[place], self.end[place]) for place in self.start}

    def sweep(self, rank: int) -> None:
        now = 0.0
        for i, action in enumerate(self.rows[rank]):
            now = max(now, self.needed(rank, action))
            if action.kind.is_compute or action.kind in LOCAL:
                self.start[rank, i] = now
                now = self.end[rank, i] = now + self.durations[action.kind, action.stage]
                continue
            start, stop = self.group[rank, i]
            if i == stop - 1:  # posts the whole group
                members = [(rank, j) for j in range(start, stop)]
                queued = [self.end[rank, j] for place in members for j in self.ahead.get(place, ())]
                began = max([now, *queued])
                self.start.update(dict.fromkeys(members, began))
                over = max(self.completed(self.rows[rank][at], (rank, at)) for _, at in members)
                self.end.update(dict.fromkeys(members, over))
                if self.rules.blocking:
                    now = max([now, *(self.end[place] for place in members)])

    def needed(self, rank: int, action: Action) -> float:
        stage, kind, batch = action
        row, own = self.rows[rank], self.at[action][1]
        if kind.is_compute or kind is Kind.FREE:
            gathers = [j for j in range(own) if row[j][:2] == (stage, Kind.GATHER)]
            place = self.at.get(Action(stage, FEEDS.get(kind, Kind.NORM), batch))
            back = self.at.get(Action(stage, Kind.RELOAD, batch)) if kind in (Kind.B, Kind.I) else None
            ends = [self.end[one] for one in (place, back) if one]
            return max([self.end[rank, j] for j in gathers] + ends, default=0.0)
        if kind is Kind.RELOAD:
            return self.end[self.at[Action(stage, Kind.OFFLOAD, batch)]]
        if kind is Kind.STEP:
            ties = [tie for tie, copies in enumerate(self.program.ties) if stage in copies]
            awaited = [
                j
                for j, (other, of, number) in enumerate(row[:own])
                if of is Kind.NORM or (of is Kind.TIE and number in ties) or (of in SUMS and other == stage)
            ]
            return self.end[rank, awaited[-1]] if awaited else 0.0
        if kind is Kind.RECV_F:
            place = self.at.get(Action(stage, Kind.RECV_META, batch))
            return self.end[place] if place else 0.0
        if kind in SUMS:
            same = [j for j in range(own) if row[j].stage == stage and row[j].kind in SUMS]
            return max((self.end[rank, j] for j in same), default=0.0)
        return 0.0

    def completed(self, action: Action, place: tuple[int, int]) -> float:
        took = self.durations[action.kind, action.stage]
        if action.kind.is_message:
            other = self.at[action.counterpart]
            if not self.rules.buffered:
                return max(self.start[place], self.start[other]) + took
            return self.start[place] if action.kind in SENDS else max(self.start[place], self.start[other] + took)
        if action.kind is Kind.TIE:
            copies = [self.at[one] for one in self.at if one.kind is Kind.TIE and one.microbatch == action.microbatch]
            last = {rank: max(i for at, i in copies if at == rank) for rank, _ in copies}
            if last[place[0]] == place[1]:
                stages = [self.rows[rank][i].stage for rank, i in last.items()]
                longest = max(self.durations[Kind.TIE, stage] for stage in stages)
                return max(self.start[one] for one in last.items()) + longest
        return self.start[place] + took
