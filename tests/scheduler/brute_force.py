"""An executor that only follows the rules: slow, obvious, and independent of the verifier's and the lowering's code.

`run` goes round the ranks and lets each do its next thing if it may, until nobody can. Whatever waits, waits for *all*
of a fixed set of events, so the outcome does not depend on who is asked first: one run stands for all of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

from pipert.scheduler.action import Action, Kind
from pipert.scheduler.program import Program

SENDS = {Kind.SEND_F: (Kind.RECV_F, +1), Kind.SEND_B: (Kind.RECV_B, -1), Kind.SEND_META: (Kind.RECV_META, +1)}
RECEIVES = {receive: (send, -offset) for send, (receive, offset) in SENDS.items()}
MESSAGES = SENDS | RECEIVES
SIZED = {Kind.SEND_META: Kind.SEND_F, Kind.RECV_META: Kind.RECV_F}
#: What a spread vocabulary needs: the collective that an action waits for.
WAITS = {Kind.S: Kind.CAST_H, Kind.SUM_H: Kind.STATS, Kind.T: Kind.STATS, Kind.G: Kind.CAST_E}
SPREAD = (Kind.CAST_H, Kind.STATS, Kind.SUM_H, Kind.SUM_E, Kind.CAST_E)
SUMS = (Kind.REDUCE, Kind.TIE, Kind.SCATTER)
LOCAL = (Kind.FREE, Kind.STEP, Kind.UNDO)
NUMBERLESS = (Kind.REDUCE, Kind.NORM, Kind.STEP, Kind.UNDO)


class Failure(Exception):
    """The run went wrong; the message says where."""


@dataclass(eq=False)
class Operation:
    """One end of a message, or a collective, from its posting to its completion."""

    rank: int
    place: int
    action: Action
    group: list[Operation] = field(default_factory=list)  # itself and those issued with it
    ahead: list[Operation] = field(default_factory=list)  # what its queue does before
    partners: list[Operation] = field(default_factory=list)  # what must have started for it to complete
    posted: bool = False
    started: bool = False
    complete: bool = False


def run(program: Program, live_limits: Sequence[int] | None = None) -> str | None:
    """Execute a program by its transport's rules.

    Args:
        program: what to run.
        live_limits: for every rank the largest number of activations it may hold at a time.

    Returns:
        None if all went well, else what went wrong.
    """
    try:
        _check_actions(program)
        _check_work(program)
        _Run(program, live_limits).go()
    except Failure as failure:
        return str(failure)
    return None


def _check_actions(program: Program) -> None:
    """Numbers in range, stages on their ranks, messages between two ranks."""
    owners = program.placement.owners
    if len(program.rows) != program.placement.num_ranks:
        raise Failure("a rank without a row, or a row without a rank")
    for rank, row in enumerate(program.rows):
        for action in row:
            numbers = {Kind.TIE: len(program.ties), **dict.fromkeys(NUMBERLESS, 1)}
            numbers |= dict.fromkeys((Kind.GATHER, Kind.FREE), max(3 * program.microbatches, 1))
            numbers = numbers.get(action.kind, program.microbatches)
            if not (action.stage < program.num_stages and action.microbatch < numbers):
                raise Failure(f"rank {rank}: {action} is out of range")
            if owners[action.stage] != rank:
                raise Failure(f"rank {rank}: {action} is another rank's")
            if action.kind in MESSAGES:
                peer = action.stage + MESSAGES[action.kind][1]
                if not 0 <= peer < program.num_stages or owners[peer] == rank:
                    raise Failure(f"rank {rank}: {action} has no other rank")
            if action.kind in (Kind.OFFLOAD, Kind.RELOAD) and action.stage < program.trainable_from:
                raise Failure(f"rank {rank}: {action} of a stage that keeps nothing")
            if action.kind in (Kind.SEND_B, Kind.RECV_B):
                lower = action.stage - (action.kind is Kind.SEND_B)
                if lower < program.trainable_from:
                    raise Failure(f"rank {rank}: {action} is a gradient that nobody wants")


def _check_work(program: Program) -> None:
    """Everything exactly once."""
    count = Counter(action for row in program.rows for action in row)
    if count and max(count.values()) > 1:
        raise Failure(f"{count.most_common(1)[0][0]} is there more than once")
    for stage in range(program.num_stages):
        for microbatch in range(program.microbatches):
            has = tuple(count[Action(stage, kind, microbatch)] for kind in (Kind.F, Kind.B, Kind.I, Kind.W))
            right = [(1, 1, 0, 0), (1, 0, 1, 1)] if stage >= program.trainable_from else [(1, 0, 0, 0)]
            if has not in right:
                raise Failure(f"stage {stage} does micro-batch {microbatch} {has} times (F, B, I, W)")
    _check_sums(program, count)
    _check_ties(program)
    _check_vocabulary(program, count)
    for rank in range(len(program.rows)):
        _check_weights(program, rank)
    _check_update(program, count)


def homes_of(program: Program) -> list[int]:
    """The first stage of every rank."""
    return [min(s for s, owner in enumerate(program.placement.owners) if owner == rank) for rank in _ranks(program)]


def _ranks(program: Program) -> range:
    return range(len(program.rows))


def _trained_homes(program: Program) -> set[int]:
    spread = program.vocabulary
    return set(homes_of(program)) if spread is not None and (spread.embedding or spread.head) else set()


def _check_vocabulary(program: Program, count: Counter[Action]) -> None:
    """Every rank does its part of everything once, at its first stage, and all do so in one order."""
    wanted: set[Kind] = set()
    if (spread := program.vocabulary) is not None:
        if spread.embedding and program.trainable_from:
            raise Failure("no gradient gets to the embedding")
        wanted = {Kind.SUM_E, Kind.CAST_H, Kind.S, Kind.STATS}
        wanted |= {Kind.T} if spread.head else set()
        wanted |= {Kind.CAST_E, Kind.G} if spread.embedding else set()
        wanted |= {Kind.SUM_H} if program.trainable_from < program.num_stages else set()
    there = {action for action in count if action.kind in (*SPREAD, Kind.S, Kind.T, Kind.G)}
    batches = range(program.microbatches)
    if there != {Action(home, kind, m) for home in homes_of(program) for kind in wanted for m in batches}:
        raise Failure("not everybody does each part of the vocabulary, or somebody does too much")
    orders = {tuple(action[1:] for action in row if action.kind in SPREAD) for row in program.rows}
    if len(orders) > 1:
        raise Failure("ranks take part in collectives in different orders")


def _check_sums(program: Program, count: Counter[Action]) -> None:
    """All trained stages are reduced, each in one way and with all its micro-batches, or none is."""
    trained = set(range(program.trainable_from, program.num_stages)) | _trained_homes(program)
    ways = []
    for stage in range(program.num_stages):
        whole, parts = count[Action(stage, Kind.REDUCE)], [a for a in count if a[:2] == (stage, Kind.SCATTER)]
        if parts and (whole or len(parts) < program.microbatches or stage not in trained):
            raise Failure(f"stage {stage} is reduced by {parts} and {whole} REDUCE")
        if stage in trained:
            ways.append(bool(whole or parts))
        elif whole or count[Action(stage, Kind.STEP)]:
            raise Failure(f"stage {stage} has no gradients")
    if len(set(ways)) > 1:
        raise Failure(f"of the trained stages are reduced: {ways}")


def _check_weights(program: Program, rank: int) -> None:
    """At ZeRO stage 3 a walk along the row with one switch for each stage; else no FREE."""
    whole = dict.fromkeys(program.placement.stages_of(rank), False)
    times: Counter[int] = Counter()
    spans = program.zero == 3 and program.microbatches > 0
    for action in program.rows[rank]:
        stage, kind, number = action
        if kind is Kind.FREE and not spans:
            raise Failure(f"{action} although weights are always whole")
        if not spans:
            continue
        if kind is Kind.GATHER:
            if whole[stage] or number != times[stage]:
                raise Failure(f"{action} out of turn")
            whole[stage] = True
        elif kind is Kind.FREE:
            if not whole[stage] or number != times[stage]:
                raise Failure(f"{action} out of turn")
            whole[stage], times[stage] = False, times[stage] + 1
        elif kind.is_compute and not whole[stage]:
            raise Failure(f"{action} without weights")
    if any(whole.values()):
        raise Failure(f"weights are never freed: {whole}")


def _check_update(program: Program, count: Counter[Action]) -> None:
    """Who is updated, and what stands on which side of it."""
    alone, stages = program.microbatches == 0, range(program.num_stages)
    trained = set(range(program.trainable_from, program.num_stages)) | _trained_homes(program)
    norms = {action.stage for action in count if action.kind is Kind.NORM}
    firsts = {program.placement.stages_of(rank)[0] for rank in range(len(program.rows))}
    if norms and (not alone or norms != firsts):
        raise Failure(f"stages {norms} take part in a norm")
    for kind in (Kind.STEP, Kind.UNDO):
        there = {action.stage for action in count if action.kind is kind}
        if there and not there >= trained:
            raise Failure(f"only stages {there} do {kind.name}")
        if there and kind is Kind.UNDO and not alone:
            raise Failure("an UNDO among computations")
    for stage in stages:
        _check_update_of(program, stage, program.rows[program.placement.owners[stage]])


def _check_update_of(program: Program, stage: int, row: Sequence[Action]) -> None:
    place = {action: at for at, action in enumerate(row)}
    changes = [place[one] for one in (Action(stage, Kind.UNDO), Action(stage, Kind.STEP)) if one in place]
    if changes != sorted(changes):
        raise Failure(f"stage {stage} is undone behind its STEP")
    if Action(stage, Kind.STEP) in place:
        ties = [tie for tie, copies in enumerate(program.ties) if stage in copies]
        sharing = {other for tie in ties for other in program.ties[tie]}
        for action in row[place[Action(stage, Kind.STEP)] :]:
            adds = action.stage == stage and action.kind in (*SUMS, Kind.B, Kind.W, Kind.T, Kind.G)
            adds |= action.stage in sharing and action.kind in (Kind.B, Kind.W, Kind.T, Kind.G)
            adds |= action.kind is Kind.TIE and action.microbatch in ties
            if adds or action.kind is Kind.NORM:
                raise Failure(f"{action} behind the STEP of stage {stage}")
    gathers = [at for action, at in place.items() if action[:2] == (stage, Kind.GATHER)]
    if program.zero == 3 and program.microbatches:
        frees = [at for action, at in place.items() if action[:2] == (stage, Kind.FREE)]
        if changes and max(frees) > changes[0]:
            raise Failure(f"the weights of stage {stage} change while they are in use")
    elif len(gathers) != (bool(changes) and program.zero in (1, 2)) or (gathers and gathers[0] < max(changes)):
        raise Failure(f"stage {stage} gathers {gathers}, changes {changes}")


def _check_ties(program: Program) -> None:
    """Every copy of a tied weight takes part, and any two ranks do what they share in the same order."""
    owners = program.placement.owners
    parts: dict[int, dict[int, int]] = {tie: {} for tie in range(len(program.ties))}  # each rank's last part in a tie
    reduced_before: dict[int, set[bool]] = defaultdict(set)
    for tie, stages in enumerate(program.ties):
        for rank, row in enumerate(program.rows):
            taken = [(place, action.stage) for place, action in enumerate(row) if action[1:] == (Kind.TIE, tie)]
            if not {stage for _, stage in taken} <= set(stages):
                raise Failure(f"rank {rank} takes part in tie {tie} for a stage without a copy")
            if taken:
                parts[tie][rank], stage = taken[-1]
                before = [action.kind for action in row[: taken[-1][0]] if action.stage == stage]
                if any(action[:2] == (stage, Kind.SCATTER) for action in row[taken[-1][0] :]):
                    raise Failure(f"rank {rank} sums tie {tie} before all gradients of stage {stage} are scattered")
                reduced_before[tie].add(Kind.REDUCE in before or Kind.SCATTER in before)
        present = {action.stage for row in program.rows for action in row if action[1:] == (Kind.TIE, tie)}
        needed = len({owners[stage] for stage in stages}) > 1 and min(stages) >= program.trainable_from
        if present != set(stages) and (needed or present):
            raise Failure(f"stages {present} sum tie {tie}, stages {stages} have copies")
        if len(reduced_before[tie]) > 1:
            raise Failure(f"tie {tie} mixes gradients before and after their reduction")
    for one, other in combinations(parts, 2):
        shared = parts[one].keys() & parts[other].keys()
        if len({parts[one][rank] < parts[other][rank] for rank in shared}) > 1:
            raise Failure(f"ties {one} and {other} in different orders")


class _Run:
    def __init__(self, program: Program, live_limits: Sequence[int] | None) -> None:
        self.program, self.limits = program, live_limits
        self.owners, self.last = program.placement.owners, program.num_stages - 1
        self.rows = [list(row) for row in program.rows]
        self.at = [0] * len(self.rows)
        self.made: set[tuple[str, int, int]] = set()  # values are used on the rank that makes them, so one set will do
        self.live = [0] * len(self.rows)
        self.operations = [self.operations_of(rank) for rank in range(len(self.rows))]
        self.open = [one for row in self.operations for one in row.values()]
        self.pair_messages()
        self.join_ties()
        self.join_spread()

    def go(self) -> None:
        progress = True
        while progress:
            progress = False
            for rank in range(len(self.rows)):
                while self.step(rank):
                    progress = True
            progress |= self.operate()
        for rank, row in enumerate(self.rows):
            if self.at[rank] < len(row):
                raise Failure(f"rank {rank} never gets past {row[self.at[rank]]}")
        if self.open:
            raise Failure(f"rank {self.open[0].rank}: {self.open[0].action} never completes")

    # ---- who waits for whom ----

    def operations_of(self, rank: int) -> dict[Action, Operation]:
        """The operations of a rank, with their groups and queues."""
        row = self.rows[rank]
        made = {a: Operation(rank, i, a) for i, a in enumerate(row) if not (a.kind.is_compute or a.kind in LOCAL)}
        for operation in made.values():
            operation.group = [operation]
        for start, stop in self.program.spans(rank):
            members = row[start:stop]
            if not self.program.semantics.grouped or not all(action.kind in MESSAGES for action in members):
                raise Failure(f"rank {rank}: {members} cannot be a group")
            group = [made[action] for action in members]
            for operation in group:
                operation.group = group
        queues = defaultdict(list)
        for operation in made.values():
            queue = queues[self.channel(operation)]
            operation.ahead = [other for other in queue if other not in operation.group]
            queue.append(operation)
        return made

    def channel(self, operation: Operation) -> object:
        action = operation.action
        if action.kind in SPREAD:
            return "vocabulary"
        if action.kind in (Kind.OFFLOAD, Kind.RELOAD):
            return action.kind
        if action.kind not in MESSAGES:
            return action
        peer = self.owners[action.stage + MESSAGES[action.kind][1]]
        channels = {"message": action, "pair": peer, "direction": (peer, action.kind in SENDS), "rank": "all"}
        return channels[self.program.semantics.channel]

    def pair_messages(self) -> None:
        """Give every message end its other end: the one with its tag, or the next in order."""
        sends, receives = defaultdict(list), defaultdict(list)
        for operation in self.open:
            stage, kind, microbatch = operation.action
            if kind in MESSAGES:
                peer = self.owners[stage + MESSAGES[kind][1]]
                tag = (
                    (stage, kind, microbatch)
                    if kind in SENDS
                    else (stage + RECEIVES[kind][1], RECEIVES[kind][0], microbatch)
                )
                line = (operation.rank, peer) if kind in SENDS else (peer, operation.rank)
                key = line if self.program.semantics.matching == "order" else tag
                (sends if kind in SENDS else receives)[key].append(operation)
        for key in sends.keys() | receives.keys():
            if len(sends[key]) != len(receives[key]):
                raise Failure(f"{key}: {len(sends[key])} sends, {len(receives[key])} receives")
            for send, receive in zip(sends[key], receives[key], strict=True):
                stage, kind, microbatch = send.action
                if receive.action != (stage + SENDS[kind][1], SENDS[kind][0], microbatch):
                    raise Failure(f"{receive.action} on rank {receive.rank} gets what {send.action} sends")
                receive.partners = [send]
                send.partners = [] if self.program.semantics.buffered else [receive]

    def join_ties(self) -> None:
        """Let the last part of each rank in a tie wait for those of the other ranks."""
        parts = defaultdict(dict)
        for operation in self.open:
            if operation.action.kind is Kind.TIE:
                parts[operation.action.microbatch][operation.rank] = operation
        for by_rank in parts.values():
            for operation in by_rank.values():
                operation.partners = list(by_rank.values())
        norms = [operation for operation in self.open if operation.action.kind is Kind.NORM]
        for operation in norms:
            operation.partners = norms

    def join_spread(self) -> None:
        """Let every rank's part in a collective of the vocabulary wait for all others'."""
        for operation in self.open:
            if operation.action.kind in SPREAD:
                operation.partners = [one for one in self.open if one.action[1:] == operation.action[1:]]

    # ---- running ----

    def step(self, rank: int) -> bool:
        """Do the next thing of a rank if it may."""
        place, row, own = self.at[rank], self.rows[rank], self.operations[rank]
        if place == len(row):
            return False
        operation = own.get(row[place])
        if self.program.semantics.blocking:
            same = operation.group if operation else []
            if not all(one.complete for one in own.values() if one.place < place and one not in same):
                return False
        if not (self.compute(rank, row[place]) if operation is None else self.may_post(operation)):
            return False
        if operation is not None:
            operation.posted = True
            self.live[rank] += {Kind.OFFLOAD: -1, Kind.RELOAD: 1}.get(operation.action.kind, 0)
            self.check_limit(rank, operation.action)
        self.at[rank] += 1
        return True

    def compute(self, rank: int, action: Action) -> bool:
        stage, kind, microbatch = action
        if not self.settled(rank, action):
            return False
        if self.program.vocabulary is not None and not self.spread(action):
            return False
        if kind in (Kind.S, Kind.T, Kind.G):
            self.made.add((f"{kind.name} done", stage, microbatch))
            return True
        if kind in LOCAL:
            return True
        if kind is Kind.F and stage > 0 and not self.brought(action, ("output", stage - 1, microbatch), Kind.RECV_F):
            return False
        if kind in (Kind.B, Kind.I):
            if not self.is_back(action):
                return False
            self.require(action, ("output", stage, microbatch))
            gradient = ("gradient", stage + 1, microbatch)
            if stage < self.last and not self.brought(action, gradient, Kind.RECV_B):
                return False
        if kind is Kind.W:
            self.require(action, ("gradient", stage, microbatch))
        makes = {Kind.F: ["output"], Kind.B: ["gradient", "weight"], Kind.I: ["gradient"], Kind.W: ["weight"]}[kind]
        self.made |= {(what, stage, microbatch) for what in makes}
        if stage >= self.program.trainable_from:
            self.live[rank] += {Kind.F: 1, Kind.I: 0}.get(kind, -1)
        self.check_limit(rank, action)
        return True

    def check_limit(self, rank: int, action: Action) -> None:
        if self.limits is not None and self.live[rank] > self.limits[rank]:
            raise Failure(f"rank {rank} holds {self.live[rank]} activations after {action}")

    def is_back(self, action: Action) -> bool:
        """Whether the activations that a backward uses are where they are used."""
        stage, _, microbatch = action
        own = self.operations[self.owners[stage]]
        out, back = (own.get(Action(stage, kind, microbatch)) for kind in (Kind.OFFLOAD, Kind.RELOAD))
        if out is None and back is None:
            return True
        if out is None or back is None or not back.posted:
            raise Failure(f"the activations of {action} are not back")
        return back.complete

    def spread(self, action: Action) -> bool:
        """Whether what an action needs of the vocabulary's collectives is there."""
        stage, kind, microbatch = action
        awaited = [WAITS[kind]] if kind in WAITS else []
        awaited += [Kind.SUM_E] if stage == 0 and kind is Kind.F else []
        awaited += [Kind.SUM_H] if stage == self.last and kind in (Kind.B, Kind.I) else []
        rank = self.owners[stage]
        for one in awaited:
            operation = self.operations[rank][Action(homes_of(self.program)[rank], one, microbatch)]
            if not operation.posted:
                raise Failure(f"rank {rank} runs {action} before {operation.action}")
            if not operation.complete:
                return False
        return True

    def settled(self, rank: int, action: Action) -> bool:
        """Whether what must be complete is: weights that are gathered, gradients that are summed, the norm."""
        for one in self.operations[rank].values():
            other, kind, number = one.action
            awaited = kind is Kind.GATHER and other == action.stage and action.kind is not Kind.STEP
            if action.kind is Kind.STEP:
                tied = kind is Kind.TIE and action.stage in self.program.ties[number]
                awaited = tied or kind is Kind.NORM or (kind in SUMS and other == action.stage)
            if awaited and one.place < self.at[rank] and not one.complete:
                return False
        return True

    def brought(self, action: Action, value: tuple[str, int, int], receive: Kind) -> bool:
        """Whether a value of another stage is there; a failure if it cannot come any more."""
        rank = self.owners[action.stage]
        if self.owners[value[1]] == rank:
            self.require(action, value)
            return True
        operation = self.operations[rank].get(Action(action.stage, receive, action.microbatch))
        if operation is None or not operation.posted:
            raise Failure(f"rank {rank} has no {value} at {action}")
        return operation.complete

    def require(self, action: Action, value: tuple[str, int, int]) -> None:
        if value not in self.made:
            raise Failure(f"rank {self.owners[action.stage]} has no {value} at {action}")

    def may_post(self, operation: Operation) -> bool:
        (stage, kind, microbatch), own = operation.action, self.operations[operation.rank]
        if kind in SPREAD:
            if kind in (Kind.STATS, Kind.SUM_H):
                self.require(operation.action, ("S done", stage, microbatch))
            if kind is Kind.CAST_H and operation.rank == self.owners[self.last]:
                self.require(operation.action, ("output", self.last, microbatch))
            if kind is Kind.CAST_E and operation.rank == self.owners[0]:
                self.require(operation.action, ("gradient", 0, microbatch))
            return self.spread(operation.action)
        if kind in (Kind.OFFLOAD, Kind.RELOAD):
            return self.may_move(operation.action)
        if kind in (Kind.SEND_F, Kind.SEND_META):
            self.require(operation.action, ("output", stage, microbatch))
        if kind is Kind.SEND_B:
            self.require(operation.action, ("gradient", stage, microbatch))
        if kind in SIZED:
            told = own.get(Action(stage, SIZED[kind], microbatch))
            if told is None or told.posted:
                raise Failure(f"rank {operation.rank}: {operation.action} does not come before its message")
        if kind is Kind.RECV_F:
            sizes = own.get(Action(stage, Kind.RECV_META, microbatch))
            return sizes is None or sizes.complete
        if kind in SUMS:
            batches = [microbatch] if kind is Kind.SCATTER else range(self.program.microbatches)
            for each in batches if stage >= self.program.trainable_from else ():
                self.require(operation.action, ("weight", stage, each))
            for each in range(self.program.microbatches) if kind is not Kind.SCATTER else ():
                self.require_shards(operation.action, each)
            same = [one for one in own.values() if one.action.stage == stage and one.action.kind in SUMS]
            return all(one.complete for one in same if one.place < operation.place)
        return True

    def may_move(self, action: Action) -> bool:
        stage, kind, microbatch = action
        self.require(action, ("output", stage, microbatch))
        out = self.operations[self.owners[stage]].get(Action(stage, Kind.OFFLOAD, microbatch))
        if out is None or (kind is Kind.RELOAD and not out.posted):
            raise Failure(f"{action} of what was never moved out")
        return kind is Kind.OFFLOAD or out.complete

    def require_shards(self, action: Action, microbatch: int) -> None:
        spread, homes = self.program.vocabulary, homes_of(self.program)
        if spread is not None and action.stage in homes:
            for kind in [Kind.T] * spread.head + [Kind.G] * spread.embedding:
                self.require(action, (f"{kind.name} done", action.stage, microbatch))

    def operate(self) -> bool:
        """Start and complete whatever may; whether there was anything."""
        changed = False
        for operation in self.open:
            if not operation.started and all(
                one.posted and all(other.complete for other in one.ahead) for one in operation.group
            ):
                operation.started = changed = True
        for operation in self.open:
            awaited = [partner for one in operation.group for partner in one.partners]
            if operation.started and all(partner.started for partner in awaited):
                operation.complete = changed = True
        self.open = [operation for operation in self.open if not operation.complete]
        return changed
