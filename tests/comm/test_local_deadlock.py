"""Deadlocks and deadlines of the local transport, against brute force."""

from __future__ import annotations

import time
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipert.comm.errors import HangError, TransportError
from pipert.comm.faults import Faults
from pipert.comm.local import run_ranks
from pipert.comm.local_transport import LocalTransport

pytestmark = pytest.mark.usefixtures("no_thread_is_left_behind")


# A program: per rank a list of ("send" | "receive", peer, tag), ("wait", how many of the oldest requests), or ("join",
# 0, 0) between two messages that are issued as one group.
Step = tuple[str, int, int]


class BruteForce:
    """Reachability over all interleavings, written from the words of the semantics and nothing of the transport."""

    def __init__(
        self,
        programs: list[list[Step]],
        buffered: bool,
        blocking: bool,
        matching: str,
        channel: str,
        grouped: bool = False,
    ) -> None:
        self.first = [self.firsts(program, grouped) for program in programs]
        self.programs = [self.unroll(p, first, blocking) for p, first in zip(programs, self.first, strict=True)]
        self.buffered, self.matching, self.channel = buffered, matching, channel

    @staticmethod
    def firsts(program: list[Step], grouped: bool) -> list[int]:
        """For each message the first of its group."""
        first: list[int] = []
        joined = False
        for step in program:
            if step[0] in ("send", "receive"):
                first.append(first[-1] if joined else len(first))
            joined = grouped and step[0] == "join"
        return first

    @staticmethod
    def unroll(program: list[Step], first: list[int], blocking: bool) -> list[Step]:
        """Make every wait one ("wait", index of the operation, 0)."""
        steps: list[Step] = []
        started = waited = 0
        for step in program:
            if step[0] == "join":
                continue
            if step[0] == "wait":
                for _ in range(min(step[1], started - waited)):
                    steps.append(("wait", waited, 0))
                    waited += 1
                continue
            steps.append(step)
            started += 1
            if blocking and first[started : started + 1] != first[started - 1 : started]:
                steps += [("wait", index, 0) for index in range(first[started - 1], started)]
        return steps + [("wait", index, 0) for index in range(waited, started)]

    def outcomes(self) -> set[bool]:
        """Whether each maximal run finishes all programs."""
        seen, stack, found = set(), [tuple(0 for _ in self.programs)], set()
        while stack:
            counters = stack.pop()
            if counters in seen:
                continue
            seen.add(counters)
            done = self.complete(counters)
            moves = [rank for rank in range(len(counters)) if self.can_move(rank, counters[rank], done)]
            if not moves:
                found.add(all(c == len(p) for c, p in zip(counters, self.programs, strict=True)))
            stack += [tuple(c + (rank == r) for r, c in enumerate(counters)) for rank in moves]
        return found

    def can_move(self, rank: int, counter: int, done: set[tuple[int, int]]) -> bool:
        if counter == len(self.programs[rank]):
            return False
        step = self.programs[rank][counter]
        return step[0] != "wait" or (rank, step[1]) in done

    def complete(self, counters: tuple[int, ...]) -> set[tuple[int, int]]:
        """The operations (rank, index) complete once those that the counters have passed are posted: a fixed point."""
        posted = [[s for s in p[:c] if s[0] != "wait"] for p, c in zip(self.programs, counters, strict=True)]
        for steps, first in zip(posted, self.first, strict=True):  # a group is posted with its last message
            while steps and len(steps) < len(first) and first[len(steps)] == first[len(steps) - 1]:
                steps.pop()
        done: set[tuple[int, int]] = set()
        while True:
            active = {
                (rank, index)
                for rank, steps in enumerate(posted)
                for index in range(len(steps))
                if all((rank, i) in done for i in self.ahead(rank, index, steps))
            }
            more = {(r, i) for r, i in active if all(self.finishes(r, j, posted, active) for j in self.group(r, i))}
            if more <= done:
                return done
            done |= more

    def group(self, rank: int, index: int) -> list[int]:
        return [other for other, first in enumerate(self.first[rank]) if first == self.first[rank][index]]

    def ahead(self, rank: int, index: int, steps: list[Step]) -> set[int]:
        """What must be complete before a message's group starts."""
        group = self.group(rank, index)
        return {i for j in group for i in range(group[0]) if self.same_queue(steps[i], steps[j])}

    def same_queue(self, one: Step, other: Step) -> bool:
        return {
            "message": False,
            "pair": one[1] == other[1],
            "direction": one[:2] == other[:2],
            "rank": True,
        }[self.channel]

    def finishes(self, rank: int, index: int, posted: list[list[Step]], active: set[tuple[int, int]]) -> bool:
        kind, peer, _ = posted[rank][index]
        if kind == "send" and self.buffered:
            return True
        mine = [i for i, s in enumerate(posted[rank]) if self.alike(s, posted[rank][index])]
        wanted = ("receive" if kind == "send" else "send", rank, posted[rank][index][2])
        theirs = [i for i, s in enumerate(posted[peer]) if self.alike(s, wanted)]
        place = mine.index(index)
        return place < len(theirs) and (peer, theirs[place]) in active

    def alike(self, step: Step, other: Step) -> bool:
        return step[:2] == other[:2] and (self.matching == "order" or step[2] == other[2])


@st.composite
def small_programs(draw: st.DrawFn) -> list[list[Step]]:
    """Programs of 2 or 3 ranks: paired messages, posted in any order, with waits between; sometimes one is missing."""
    size = draw(st.integers(2, 3))
    programs: list[list[Step]] = [[] for _ in range(size)]
    for _ in range(draw(st.integers(1, 5))):
        source = draw(st.integers(0, size - 1))
        dest = draw(st.integers(0, size - 2))
        dest += dest >= source
        tag = draw(st.integers(0, 1))
        programs[source].append(("send", dest, tag))
        programs[dest].append(("receive", source, tag))
    for rank in range(size):
        programs[rank] = list(draw(st.permutations(programs[rank])))
        if programs[rank] and draw(st.integers(0, 7)) == 0:
            programs[rank].pop()
        for _ in range(draw(st.integers(0, 3))):
            programs[rank].insert(draw(st.integers(0, len(programs[rank]))), ("wait", draw(st.integers(1, 2)), 0))
        for at in reversed(range(1, len(programs[rank]))):
            if "wait" not in (programs[rank][at - 1][0], programs[rank][at][0]) and draw(st.booleans()):
                programs[rank].insert(at, ("join", 0, 0))
    return programs


@settings(max_examples=400, deadline=None)
@given(
    small_programs(),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["tag", "order"]),
    st.sampled_from(["message", "pair", "direction", "rank"]),
    st.booleans(),
    st.none() | st.from_type(Faults) | st.builds(Faults, st.integers(0, 99), st.just(1e-3), st.just("real")),
)
def test_a_deadlock_is_raised_exactly_where_brute_force_reaches_one(
    programs, buffered, blocking, matching, channel, grouped, faults
) -> None:
    rules = {"buffered": buffered, "blocking": blocking, "matching": matching, "channel": channel, "grouped": grouped}
    brute = BruteForce(programs, **rules)
    (finishes,) = brute.outcomes()  # one outcome: without wildcards it cannot depend on the interleaving

    def fn(transport: LocalTransport) -> None:
        requests = []
        steps = list(brute.programs[transport.rank])
        while steps:
            if steps[0][0] == "wait":
                _, index, _ = steps.pop(0)
                transport.wait(requests[index], f"step {index}")
                continue
            members = brute.group(transport.rank, len(requests))
            with transport.group() if len(members) > 1 else nullcontext():
                for kind, peer, tag in steps[: len(members)]:
                    start = transport.isend if kind == "send" else transport.irecv
                    requests.append(start(torch.zeros(1), peer, tag))
            del steps[: len(members)]

    if finishes:
        run_ranks(len(programs), fn, faults=faults, leftovers="ignore", deadline=5.0, **rules)
    else:
        with pytest.raises(HangError, match="deadlock"):
            run_ranks(len(programs), fn, faults=faults, deadline=5.0, **rules)


def test_a_deadlock_report_names_what_every_rank_waits_for_in_the_words_it_was_given() -> None:
    def fn(transport: LocalTransport) -> None:
        if transport.rank == 2:
            return
        other = 1 - transport.rank
        transport.isend(torch.zeros(1), other, 5)
        transport.wait(transport.irecv(torch.zeros(1), other, 3), f"{transport.rank}RECV_F3", other)

    start = time.monotonic()
    outcomes = run_ranks(3, fn, return_exceptions=True)
    assert time.monotonic() - start < 30.0  # not the deadline, which is 60
    assert [type(outcome) for outcome in outcomes] == [HangError, HangError, type(None)]
    assert str(outcomes[0]).splitlines() == [
        "deadlock: every live rank waits and nothing is under way",
        "  rank 0 waits in 0RECV_F3: receive from rank 1, tag 3 (rank 1 offers tag 5)",
        "  rank 1 waits in 1RECV_F3: receive from rank 0, tag 3 (rank 0 offers tag 5)",
        "  rank 2 has finished",
    ]


def test_the_last_rank_to_finish_can_leave_the_others_in_a_deadlock() -> None:
    def fn(transport: LocalTransport) -> None:
        if transport.rank == 0:
            time.sleep(0.05)
        else:
            transport.barrier()

    with pytest.raises(HangError, match=r"exchange \(collective 0 of ranks \[0, 1, 2\]\), not yet entered by rank 0"):
        run_ranks(3, fn)


def test_a_job_that_waits_long_but_not_forever_is_no_deadlock() -> None:
    def fn(transport: LocalTransport) -> None:
        if transport.rank == 0:
            time.sleep(0.2)
        transport.barrier()

    run_ranks(3, fn)


def test_a_rank_that_computes_past_the_deadline_is_named_with_the_line_it_runs() -> None:
    def fn(transport: LocalTransport) -> None:
        if transport.rank == 1:
            transport.report("1F4")
            while True:
                time.sleep(0.01)
        transport.wait(transport.irecv(torch.zeros(1), 1, 0), "0RECV_B4")

    with pytest.raises(HangError) as caught:
        run_ranks(2, fn, deadline=0.2, grace=0.1)
    lines = str(caught.value).splitlines()
    assert lines[0] == "rank 0 has waited 0.2 s, its deadline"
    assert lines[1] == "  rank 0 waits in 0RECV_B4: receive from rank 1, tag 0"
    assert lines[2].startswith("  rank 1 does not wait: it runs 1F4, test_local_deadlock.py:")


def test_a_deadlock_is_proved_after_the_last_delivery_in_real_time_even_when_nobody_waits_for_that() -> None:
    def fn(transport: LocalTransport) -> None:
        other = 1 - transport.rank
        transport.isend(torch.zeros(1), other, 0)
        transport.irecv(torch.zeros(1), other, 0)
        transport.wait(transport.irecv(torch.zeros(1), other, 1))

    with pytest.raises(HangError, match="deadlock"):
        run_ranks(2, fn, faults=Faults(delay=0.1, clock="real"), deadline=5.0)


def test_a_sleeping_rank_wakes_for_a_delivery_that_is_planned_after_it_fell_asleep() -> None:
    def fn(transport: LocalTransport) -> None:
        if transport.rank == 0:
            time.sleep(0.05)
            transport.isend(torch.zeros(1), 1, 0)  # buffered: nobody else stays awake for it
        else:
            transport.wait(transport.irecv(torch.zeros(1), 0, 0))

    start = time.monotonic()
    run_ranks(2, fn, buffered=True, faults=Faults(delay=0.05, clock="real"), deadline=60.0)
    assert time.monotonic() - start < 30.0  # not the deadline


def test_a_message_received_in_a_group_is_there_when_the_rest_of_the_group_is() -> None:
    """Rank 1 takes what rank 0 sends in its group only after it has heard from rank 0 about what that received."""

    def rank(transport: LocalTransport, grouped: bool) -> None:
        tensor = torch.zeros(1)
        if transport.rank == 0:
            with transport.group() if grouped else nullcontext():
                received, sent = transport.irecv(tensor, 1, 0), transport.isend(torch.ones(1), 1, 1)
            transport.wait(received)
            transport.wait(transport.isend(tensor, 2, 2))
            transport.wait(sent)
        elif transport.rank == 1:
            transport.wait(transport.isend(torch.full((1,), 7.0), 0, 0))
            transport.wait(transport.irecv(tensor, 2, 2))
            assert tensor == 7
            transport.wait(transport.irecv(tensor, 0, 1))
            assert tensor == 1
        else:
            transport.wait(transport.irecv(tensor, 0, 2))
            transport.wait(transport.isend(tensor, 1, 2))

    rules = {"matching": "order", "channel": "pair", "grouped": True}
    run_ranks(3, lambda transport: rank(transport, False), **rules)
    with pytest.raises(HangError, match="receive from rank 1, tag 0, in one group with send to rank 1, tag 1\n"):
        run_ranks(3, lambda transport: rank(transport, True), **rules)
    run_ranks(3, lambda transport: rank(transport, True), **(rules | {"grouped": False}))  # no groups there


def test_a_group_cannot_be_waited_for_nor_hold_another_before_its_end() -> None:
    def fn(transport: LocalTransport) -> None:
        other, into = 1 - transport.rank, torch.zeros(1)
        with pytest.raises(TransportError, match=r"begins inside another one"), transport.group(), transport.group():
            pass
        with transport.group():
            sent = transport.isend(torch.ones(1), other, 0)
            with pytest.raises(TransportError, match="of a group that is still open: 0SEND_F0"):
                transport.wait(sent, "0SEND_F0")
            assert not sent.test()
            received = transport.irecv(into, other, 0)
        for request in (sent, received, sent):
            transport.wait(request)
        assert into == 1 and sent.test()

    for channel in ("message", "pair", "rank"):
        for blocking in (False, True):
            run_ranks(2, fn, channel=channel, blocking=blocking, grouped=True)


def test_a_group_that_fails_before_its_end_starts_nothing() -> None:
    def fn(transport: LocalTransport) -> None:
        with pytest.raises(ZeroDivisionError), transport.group():
            transport.isend(torch.ones(1), 1 - transport.rank, 0)
            raise ZeroDivisionError

    run_ranks(2, fn, grouped=True)  # nothing is left over
