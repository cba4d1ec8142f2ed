"""Collectives, groups and counters of the local transport."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipert.comm.errors import MessageError
from pipert.comm.faults import Faults
from pipert.comm.local import run_ranks
from pipert.comm.local_transport import LocalTransport

pytestmark = pytest.mark.usefixtures("no_thread_is_left_behind")


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(0, 9),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.complex64]),
    st.integers(0, 2**31),
    st.none() | st.from_type(Faults),
)
def test_collectives_agree_bitwise_with_a_sum_in_rank_order(size, count, dtype, seed, faults) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = [(torch.randn(size * count, generator=generator) * 100).to(dtype) for _ in range(size)]
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    total = total.to(dtype)

    def fn(transport: LocalTransport) -> list[bytes]:
        mine = parts[transport.rank]
        reduced, scattered, gathered = mine.clone(), mine[:count].clone(), mine.repeat(size)
        root = size - 1
        copied = mine.clone()
        requests = [
            transport.iallreduce(reduced),
            transport.ireduce_scatter(scattered, mine),
            transport.iallgather(gathered, mine),
            transport.ibroadcast(copied, root),
        ]
        for request in reversed(requests):
            transport.wait(request)
        return [bits(reduced), bits(scattered), bits(gathered), bits(copied)]

    for rank, got in enumerate(run_ranks(size, fn, faults=faults)):
        scattered = total.view(size, count)[rank] if count else total
        assert got == [bits(total), bits(scattered), bits(torch.cat(parts)), bits(parts[-1])]


def test_bf16_sums_round_once() -> None:
    def fn(transport: LocalTransport) -> float:
        ones = torch.ones(1, dtype=torch.bfloat16)
        transport.wait(transport.iallreduce(ones))
        return ones.item()

    assert set(run_ranks(30, lambda t: fn(t))) == {30.0}

    def small(transport: LocalTransport) -> float:
        value = torch.tensor([256.0 if transport.rank == 0 else 0.9], dtype=torch.bfloat16)
        transport.wait(transport.iallreduce(value))
        return value.item()

    # one by one in bf16 every 0.9 would be lost: 256 + 0.9 rounds to 256
    assert set(run_ranks(9, small)) == {264.0}


def test_a_maximum_lets_nan_through_and_takes_bools() -> None:
    def fn(transport: LocalTransport) -> tuple[float, float, bool]:
        values = torch.tensor([float(transport.rank), float("nan") if transport.rank == 1 else 0.0])
        flag = torch.tensor([transport.rank == 2])
        transport.wait(transport.iallreduce(values, "max"))
        transport.wait(transport.iallreduce(flag, "max"))
        return values[0].item(), values[1].item(), bool(flag)

    for first, second, flag in run_ranks(3, fn):
        assert first == 2.0
        assert second != second
        assert flag


def test_reductions_without_a_meaning_are_refused() -> None:
    def fn(transport: LocalTransport) -> None:
        with pytest.raises(MessageError, match="'mean' is not a reduction"):
            transport.iallreduce(torch.zeros(1), "mean")
        with pytest.raises(MessageError, match="sum of bools"):
            transport.iallreduce(torch.zeros(1, dtype=torch.bool))
        with pytest.raises(MessageError, match="no maximum"):
            transport.iallreduce(torch.zeros(1, dtype=torch.complex64), "max")
        with pytest.raises(MessageError, match=r"reduce_scatter: 5 elements are not 2 ranks x 2"):
            transport.ireduce_scatter(torch.zeros(2), torch.zeros(5))
        with pytest.raises(MessageError, match=r"allgather: the dtypes .* differ"):
            transport.iallgather(torch.zeros(2), torch.zeros(1, dtype=torch.float64))

    run_ranks(2, fn)


def test_the_part_gathered_may_lie_in_the_result() -> None:
    def fn(transport: LocalTransport) -> list[float]:
        out = torch.full((3,), -1.0)
        out[transport.rank] = transport.rank
        transport.wait(transport.iallgather(out, out[transport.rank : transport.rank + 1]))
        return out.tolist()

    assert run_ranks(3, fn) == [[0.0, 1.0, 2.0]] * 3


@pytest.mark.parametrize("odd", ["kind", "size", "dtype", "op"])
def test_ranks_in_different_collectives_are_told_on_every_rank(odd: str) -> None:
    def fn(transport: LocalTransport) -> None:
        differs = transport.rank == 1
        if odd == "kind" and differs:
            transport.barrier()
        dtype = torch.float64 if odd == "dtype" and differs else torch.float32
        tensor = torch.zeros(3 if odd == "size" and differs else 2, dtype=dtype)
        transport.wait(transport.iallreduce(tensor, "max" if odd == "op" and differs else "sum"))

    outcomes = run_ranks(3, fn, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [MessageError] * 3
    assert all("collective 0 of ranks [0, 1, 2] differs" in str(outcome) for outcome in outcomes)


def test_blobs_of_any_length_are_exchanged() -> None:
    blobs = [b"", b"a" * 1000, b"\x00\x01"]
    assert run_ranks(3, lambda transport: transport.exchange(blobs[transport.rank])) == [blobs] * 3


def test_split_groups_by_color_and_orders_by_key() -> None:
    def fn(transport: LocalTransport) -> tuple[int, int, float] | None:
        rank = transport.rank
        sub = transport.split(None if rank == 4 else rank % 2, -rank)
        again = transport.split(0, rank)
        assert again is not None
        assert again.rank == rank
        if sub is None:
            return None
        value = torch.tensor([float(rank)])
        transport.wait(sub.iallreduce(value))
        own = torch.tensor([float(rank)])
        sub.wait(sub.ibroadcast(own, 0))
        assert own.item() == (3.0 if rank % 2 else 2.0)
        return sub.rank, sub.size, value.item()

    assert run_ranks(5, fn) == [(1, 2, 2.0), (1, 2, 4.0), (0, 2, 2.0), (0, 2, 4.0), None]


def test_messages_of_one_group_never_meet_those_of_another() -> None:
    def fn(transport: LocalTransport) -> list[float]:
        sub = transport.split(0, transport.rank)
        subsub = transport.split(0, transport.rank)
        assert sub is not None
        assert subsub is not None
        groups = [transport, sub, subsub]
        other = 1 - transport.rank
        into = [torch.zeros(1) for _ in groups]
        requests = [g.irecv(t, other, 0) for g, t in reversed(list(zip(groups, into, strict=True)))]
        requests += [g.isend(torch.tensor([float(n)]), other, 0) for n, g in enumerate(groups)]
        for request in requests:
            transport.wait(request)
        return [tensor.item() for tensor in into]

    assert run_ranks(2, fn) == [[0.0, 1.0, 2.0]] * 2


def test_counters_count_messages_and_bytes_by_kind() -> None:
    def fn(transport: LocalTransport) -> tuple[dict[str, int], dict[str, int]]:
        other = 1 - transport.rank
        for request in [transport.isend(torch.zeros(3), other, 0), transport.irecv(torch.zeros(3), other, 0)]:
            transport.wait(request)
        transport.wait(transport.iallgather(torch.zeros(8), torch.zeros(4)))
        transport.exchange(b"abc")
        return dict(transport.counters.messages), dict(transport.counters.bytes)

    expected = {"send": 1, "receive": 1, "allgather": 1, "exchange": 1}
    sizes = {"send": 12, "receive": 12, "allgather": 32, "exchange": 3}
    assert run_ranks(2, fn) == [(expected, sizes)] * 2


def test_the_semantics_are_those_asked_for_in_the_verifiers_words() -> None:
    from pipert.scheduler.semantics import Semantics

    asked = {"buffered": True, "blocking": False, "matching": "order", "channel": "direction", "grouped": True}
    (semantics,) = run_ranks(1, lambda transport: transport.semantics, **asked)  # type: ignore[arg-type]
    assert Semantics(**semantics) == Semantics("local", **asked)  # type: ignore[arg-type]
