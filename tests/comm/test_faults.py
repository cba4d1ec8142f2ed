"""What the fault plan does to a local job."""

from __future__ import annotations

import time

import pytest
import torch

from pipert.comm.errors import HangError, JobAborted
from pipert.comm.faults import Faults
from pipert.comm.local import run_ranks
from pipert.comm.local_transport import LocalTransport

pytestmark = pytest.mark.usefixtures("no_thread_is_left_behind")


@pytest.mark.parametrize("nth", range(4))
def test_a_killed_rank_is_named_by_all_others(nth: int) -> None:
    caught: list[int] = []

    def fn(transport: LocalTransport) -> None:
        right, left = (transport.rank + 1) % 4, (transport.rank - 1) % 4
        try:
            for step in range(2):
                requests = [transport.isend(torch.zeros(1), right, step), transport.irecv(torch.zeros(1), left, step)]
                for request in requests:
                    transport.wait(request)
            transport.barrier()
        except Exception:
            caught.append(transport.rank)
            raise

    outcomes = run_ranks(4, fn, faults=Faults(kill=((2, nth),)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [JobAborted] * 4
    assert all(f"rank 2 was killed by the fault plan at its operation {nth}" in str(o) for o in outcomes)
    assert sorted(caught) == [0, 1, 3]  # the dead tell no tales: no handler of ordinary errors runs


def test_a_lost_message_ends_in_a_deadlock_report_that_says_so() -> None:
    def fn(transport: LocalTransport) -> None:
        for step in range(3):
            if transport.rank == 0:
                transport.wait(transport.isend(torch.zeros(1), 1, step))
            else:
                transport.wait(transport.irecv(torch.zeros(1), 0, step), f"1RECV_F{step}")

    lost = Faults(drop=((0, 1, 1),))
    with pytest.raises(
        HangError, match=r"rank 0 waits in send to rank 1, tag 1 \(lost by the fault plan\)\n.*1RECV_F1"
    ):
        run_ranks(2, fn, faults=lost)
    with pytest.raises(HangError, match=r"rank 0 has finished\n  rank 1 waits in 1RECV_F1"):
        run_ranks(2, fn, faults=lost, buffered=True)


def test_messages_lost_at_random_are_the_same_in_every_run_of_a_seed() -> None:
    def fn(transport: LocalTransport) -> list[bool]:
        into = [torch.zeros(1) for _ in range(40)]
        other = 1 - transport.rank
        requests = [transport.irecv(tensor, other, tag) for tag, tensor in enumerate(into)]
        for tag in range(40):
            transport.isend(torch.ones(1), other, tag)
        transport.barrier()
        return [request.test() for request in requests]

    def arrived(seed: int) -> list[list[bool]]:
        return run_ranks(2, fn, buffered=True, faults=Faults(seed=seed, drop_rate=0.5), leftovers="ignore")

    assert arrived(1) == arrived(1)
    assert arrived(1) != arrived(2)
    assert 5 < sum(arrived(1)[0]) < 35


def arrivals(reorder: bool, seed: int, tags: range, matching: str = "tag") -> list[int]:
    """In what order ten messages complete, as a receiver that sleeps sees it."""

    def fn(transport: LocalTransport) -> list[int]:
        if transport.rank == 0:
            for request in [transport.isend(torch.zeros(1), 1, tag) for tag in tags]:
                transport.wait(request)
            return []
        requests = [transport.irecv(torch.zeros(1), 0, tag) for tag in tags]
        seen: list[int] = []
        while len(seen) < len(tags):
            transport.progress()
            seen += [i for i, request in enumerate(requests) if i not in seen and request.done]  # type: ignore
        return seen

    return run_ranks(2, fn, faults=Faults(seed=seed, delay=1.0, reorder=reorder), matching=matching)[1]  # type: ignore


def test_messages_with_other_tags_overtake_each_other_only_where_asked() -> None:
    tags = range(10)
    assert arrivals(False, 1, tags) == list(tags)
    assert any(arrivals(True, seed, tags) != list(tags) for seed in range(3))
    assert all(arrivals(True, seed, tags, matching="order") == list(tags) for seed in range(3))


def test_messages_with_one_tag_never_overtake() -> None:
    def fn(transport: LocalTransport) -> list[int]:
        if transport.rank == 0:
            for request in [transport.isend(torch.tensor([n]), 1, 0) for n in range(10)]:
                transport.wait(request)
            return []
        into = [torch.zeros(1, dtype=torch.int64) for _ in range(10)]
        requests = [transport.irecv(tensor, 0, 0) for tensor in into]
        transport.wait(requests[-1])
        return [int(tensor) for tensor in into]

    for seed in range(5):
        assert run_ranks(2, fn, faults=Faults(seed=seed, delay=1.0, reorder=True))[1] == list(range(10))


def test_real_delays_take_time_and_are_no_deadlock() -> None:
    def fn(transport: LocalTransport) -> float:
        start = time.monotonic()
        if transport.rank == 0:
            transport.wait(transport.isend(torch.zeros(1), 1, 0))
        else:
            transport.wait(transport.irecv(torch.zeros(1), 0, 0))
        return time.monotonic() - start

    for seed in range(3):
        plan = Faults(seed=seed, delay=0.1, clock="real")
        drawn = plan.stream("message", 0, 1).uniform(0, 0.1)
        took = run_ranks(2, fn, faults=plan)
        assert all(drawn - 0.01 <= seconds < drawn + 0.2 for seconds in took)


def test_stalls_sleep_before_each_reported_action() -> None:
    def fn(transport: LocalTransport) -> None:
        for _ in range(5):
            transport.report("0F0")

    start = time.monotonic()
    run_ranks(2, fn, faults=Faults(seed=0, stall=0.02))
    assert 0.01 < time.monotonic() - start < 1.0
