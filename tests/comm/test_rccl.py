"""The RCCL transport and its mixture with another one, on the stand-in library; ranks are threads."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipert.comm import rccl_agree
from pipert.comm.errors import HangError, JobAborted, MeshError, MessageError, OptionError, TransportError
from pipert.comm.local import current_transport, run_ranks
from pipert.comm.mesh import Mesh
from pipert.comm.mixed import MixedTransport
from pipert.comm.rccl import RcclTransport
from pipert.comm.rccl_agree import SEMANTICS, Channel
from pipert.comm.rccl_library import RcclError
from pipert.comm.reduction import reduce_in_order
from pipert.comm.transport import Request, Transport
from pipert.scheduler.semantics import Semantics
from pipert.scheduler.transports import transport as named_transport

SUMMED = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int16, torch.int64)
CHANNELS: tuple[Channel, ...] = ("pair", "direction")
pytestmark = pytest.mark.usefixtures("rccl")


def run(size: int, rank: Callable[[RcclTransport], Any], channel: Channel = "pair", **options: Any) -> list[Any]:
    """Run ranks that are neighbours in a ring."""

    def body(control: Transport) -> Any:
        transport = RcclTransport.over(control, channel)
        transport.connect((here, (here + 1) % size) for here in range(size))
        result = rank(transport)
        transport.close()
        return result

    return run_ranks(size, body, **options)


def wait_all(transport: Transport, *requests: Request) -> None:
    for request in requests:
        transport.wait(request)


# ---- messages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channel", CHANNELS)
def test_messages_of_every_dtype_and_shape_arrive_bit_for_bit(channel: Channel) -> None:
    def rank(transport: RcclTransport) -> None:
        peer = 1 - transport.rank
        nan = torch.tensor([0x7FC1, 0x7F81, -1, -63], dtype=torch.int16).view(torch.bfloat16)
        sent = [nan, torch.tensor(2 + 3j), torch.arange(70_000).view(7, -1), torch.tensor([True, False]), torch.ones(3)]
        sent += [torch.empty(0, 3), torch.tensor([0.5], dtype=torch.float8_e4m3fn)]
        got = [torch.zeros_like(tensor) for tensor in sent]
        with transport.group():
            requests = [transport.isend(tensor, peer, 0) for tensor in sent]
            requests += [transport.irecv(tensor, peer, 0) for tensor in got]
        wait_all(transport, *requests)
        for mine, theirs in zip(sent, got, strict=True):
            assert mine.flatten().view(torch.uint8).tolist() == theirs.flatten().view(torch.uint8).tolist()

    run(2, rank, channel)


def test_each_direction_has_its_own_queue_or_the_pair_has_one() -> None:
    def rank(transport: RcclTransport) -> None:
        peer, got = 1 - transport.rank, torch.zeros(3)
        requests = [transport.isend(torch.ones(3), peer, 0), transport.irecv(got, peer, 0)]
        wait_all(transport, *requests)
        assert (got == 1).all()

    run(2, rank, "direction")
    with pytest.raises(HangError, match=r"has waited 0.5 s, its deadline"):
        run(2, rank, "pair", deadline=0.5)


def test_messages_with_several_ranks_pass_at_once(size: int = 5) -> None:
    def rank(transport: RcclTransport) -> None:
        left, right = (transport.rank - 1) % size, (transport.rank + 1) % size
        for turn in range(20):
            got = [torch.zeros(2), torch.zeros(2)]
            mine = torch.full((2,), 10.0 * transport.rank + turn)
            with transport.group():
                requests = [transport.isend(mine, right, 0), transport.isend(mine, left, 0)]
                requests += [transport.irecv(got[0], left, 0), transport.irecv(got[1], right, 0)]
            wait_all(transport, *requests)
            assert [int(each[0]) for each in got] == [10 * left + turn, 10 * right + turn]
        assert transport.counters.messages["send"] == 40 + 2

    run(size, rank)


def test_what_cannot_be_sent_is_refused_before_anything_is_started() -> None:
    def rank(transport: RcclTransport) -> None:
        before = transport.counters.messages.copy()
        peer, good = (transport.rank + 1) % 4, torch.zeros(4)
        for tensor, other, tag, words in [
            (torch.zeros(4, 4).t(), peer, 0, "not contiguous"),
            (torch.empty(3, device="meta"), peer, 0, "no dense memory"),
            (good, 4, 0, "not a rank of this group of 4"),
            (good, peer, -1, "out of bounds"),
            (good, (transport.rank + 2) % 4, 0, "are not connected; call connect"),
            (good, transport.rank, 0, "are not connected"),
        ]:
            for start in (transport.isend, transport.irecv):
                with pytest.raises(MessageError, match=words):
                    start(tensor, other, tag)
        for collective in (
            lambda: transport.iallreduce(torch.zeros(3, dtype=torch.bool)),
            lambda: transport.iallreduce(good, "mean"),
            lambda: transport.ibroadcast(good, 4),
            lambda: transport.ireduce_scatter(torch.zeros(3), good),
            lambda: transport.iallgather(good, good),
        ):
            with pytest.raises(MessageError):
                collective()
        with transport.group():
            request = transport.isend(good, peer, 0)
            got = transport.irecv(torch.zeros(4), (transport.rank - 1) % 4, 0)
            assert not request.test()
            with pytest.raises(TransportError, match="a group that is still open"):
                transport.wait(request)
            with pytest.raises(TransportError, match="begins inside another"), transport.group():
                pass
        wait_all(transport, request, got)
        before.update({"send": 1, "receive": 1})
        assert transport.counters.messages == before

    run(4, rank)


def test_ranks_that_connect_different_pairs_are_told() -> None:
    def rank(control: Transport) -> None:
        transport = RcclTransport.over(control)
        with pytest.raises(TransportError, match=r"rank 0 connects the pairs \[\[0, 1\]\], rank 1 \[\]"):
            transport.connect([(0, 1)] if control.rank == 0 else [])
        transport.connect([(1, 0), (0, 1), (1, 1)])
        transport.connect([(0, 1)])  # they are
        assert transport.counters.messages["send"] == 1

    run_ranks(2, rank)


# ---- collectives ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int16, torch.int64]
)
def test_sums_are_those_in_rank_order_rounded_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    parts = [(torch.randn(12, 1001, generator=generator) * 9).to(dtype) for _ in range(4)]
    wanted = reduce_in_order(parts, "sum")

    def rank(transport: RcclTransport) -> None:
        mine = parts[transport.rank]
        total, part = mine.clone(), torch.empty_like(mine[:3])
        whole, copied = torch.empty(4, *mine.shape, dtype=dtype), mine.clone()
        wait_all(
            transport,
            transport.iallreduce(total),
            transport.ireduce_scatter(part, mine),
            transport.iallgather(whole, mine),
            transport.ibroadcast(copied, 2),
        )
        assert torch.equal(total, wanted)
        assert torch.equal(part, wanted[3 * transport.rank : 3 * transport.rank + 3])
        assert torch.equal(whole, torch.stack(parts)) and torch.equal(copied, parts[2])

    run(4, rank)


def test_maxima_keep_nans_and_complex_numbers_are_summed() -> None:
    def rank(transport: RcclTransport) -> None:
        largest = torch.tensor([float(transport.rank), float("nan") if transport.rank == 1 else 0.0])
        flags = torch.tensor([transport.rank == 2, False])
        z = torch.tensor([1 + 2j]) * transport.rank
        wait_all(
            transport, transport.iallreduce(largest, "max"), transport.iallreduce(flags, "max"), transport.iallreduce(z)
        )
        assert largest[0] == 2 and largest[1].isnan() and flags.tolist() == [True, False] and z[0] == 3 + 6j
        wait_all(transport, transport.iallreduce(torch.empty(0)))

    run(3, rank)


def test_ones_in_bf16_over_ranks_are_their_number() -> None:
    def rank(transport: RcclTransport) -> float:
        ones = torch.ones(1000, dtype=torch.bfloat16)
        transport.wait(transport.iallreduce(ones))
        return float(ones[0])

    assert run(2, rank) == [2.0, 2.0] and run(32, rank) == [32.0] * 32


def test_groups_divide_and_each_has_its_own_order() -> None:
    def rank(transport: RcclTransport) -> list[float]:
        part = transport.split(transport.rank % 2 if transport.rank < 4 else None, -transport.rank)
        if part is None:
            return []
        mine = torch.tensor([float(transport.rank)])
        whole = torch.empty(part.size)
        part.wait(part.iallgather(whole, mine))
        part.close()
        return [float(part.rank), *whole.tolist()]

    assert run(5, rank) == [[1, 2, 0], [1, 3, 1], [0, 2, 0], [0, 3, 1], []]


# ---- waiting and failing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [0.0, 0.1])
def test_a_rank_that_fails_ends_the_waits_of_the_others_with_its_cause(late: float) -> None:
    def rank(transport: RcclTransport) -> None:
        if transport.rank == 1:
            error = ValueError("out of luck")
            transport.abort(error)
            raise error
        time.sleep(late)
        transport.wait(transport.irecv(torch.zeros(3), 1, 0), "1RECV_F0", 1)

    found = run(2, rank, return_exceptions=True)
    assert isinstance(found[0], JobAborted) and "rank 1 failed first: ValueError: out of luck" in str(found[0])
    assert isinstance(found[1], ValueError)


def test_a_wait_past_the_deadline_says_what_it_was_in() -> None:
    def rank(transport: RcclTransport) -> None:
        if transport.rank == 0:
            transport.wait(transport.irecv(torch.zeros(3), 1, 0), "1RECV_F0", 1)

    with pytest.raises(HangError, match=r"rank 0 has waited 0.3 s, its deadline, in 1RECV_F0"):
        run(2, rank, deadline=0.3)


def test_a_message_that_is_lost_is_a_hang_with_a_deadline(rccl: Path) -> None:
    fault = ctypes.CDLL(str(rccl)).standinFault

    def rank(transport: RcclTransport) -> None:
        transport.exchange(b"")  # connected
        if transport.rank == 0:
            fault(ctypes.c_char(b"h"), ctypes.c_longlong(0), ctypes.c_double(0))
            transport.wait(transport.isend(torch.zeros(3), 1, 0), "0SEND_F0", 1)

    try:
        with pytest.raises(HangError, match=r"rank 0 has waited 0.3 s, its deadline, in 0SEND_F0"):
            run(2, rank, deadline=0.3)
    finally:
        fault(ctypes.c_char(b"\0"), ctypes.c_longlong(0), ctypes.c_double(0))


def test_closing_with_a_message_under_way_is_a_hang() -> None:
    def rank(transport: RcclTransport) -> None:
        if transport.rank == 0:
            transport.irecv(torch.zeros(3), 1, 0)

    with pytest.raises(HangError, match=r"its deadline, in closing communicators of RCCL"):
        run(2, rank, deadline=0.5)


def test_sizes_that_do_not_fit_are_an_error_of_the_wait() -> None:
    def rank(transport: RcclTransport) -> None:
        peer = 1 - transport.rank
        message = transport.isend if transport.rank else transport.irecv
        transport.wait(message(torch.zeros(3 + transport.rank), peer, 0), "1RECV_F0", peer)

    found = run(2, rank, return_exceptions=True)
    assert any(isinstance(error, RcclError) and "sends 16 x" in str(error) for error in found), found


def test_one_rank_without_a_library_is_a_refusal_on_all(rccl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find() -> str:
        if current_transport().rank == 1:
            raise TransportError("no RCCL here")
        return str(rccl)

    def rank(control: Transport) -> None:
        with pytest.raises(TransportError, match="rank 1: no RCCL here"):
            RcclTransport.over(control)

    monkeypatch.setattr(rccl_agree, "find_library", find)
    run_ranks(2, rank)


def test_options_are_checked() -> None:
    with pytest.raises(OptionError, match="channel = 'rank' is unknown; use one of pair, direction"):
        run_ranks(1, lambda control: RcclTransport.over(control, "rank"))
    with pytest.raises(OptionError, match="tensors = 'nccl' is unknown; use one of mpi, rccl, rccl-direction"):
        Mesh.from_mpi(tensors="nccl")
    with pytest.raises(TransportError, match=r'rank 0 has channel and version \["pair", .*rank 1 \["direction"'):
        run_ranks(2, lambda control: RcclTransport.over(control, CHANNELS[control.rank]))


# ---- with another transport -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("channel", CHANNELS)
def test_the_verifier_and_the_command_line_judge_by_the_same_rules(channel: Channel) -> None:
    rules = Semantics(**SEMANTICS[channel])
    assert rules == named_transport("rccl", channel)
    assert run(2, lambda transport: Semantics(**transport.semantics), channel) == [rules] * 2


def test_the_mixture_sends_each_tensor_where_it_can_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(control: Transport) -> tuple[int, int]:
        transport = MixedTransport.over(control)
        transport.connect([(0, 1)])
        monkeypatch.setattr(transport, "_for", lambda tensor: transport._tensors if len(tensor) > 1 else control)
        peer, short, long = 1 - transport.rank, torch.ones(1), torch.ones(2)
        with transport.group():
            requests = [transport.irecv(torch.zeros(1), peer, 5), transport.isend(short, peer, 5)]
            requests += [transport.isend(long, peer, 6), transport.irecv(torch.zeros(2), peer, 6)]
        requests += [transport.iallreduce(short), transport.iallreduce(long)]
        wait_all(transport, *requests)
        assert short[0] == 2 and long[0] == 2 and transport.control is control
        assert transport.exchange(b"x") == [b"x", b"x"]
        return transport.counters.messages["allreduce"], control.counters.messages["allreduce"]

    assert run_ranks(2, rank) == [(1, 1), (1, 1)]


def test_a_mesh_over_the_mixture_has_groups_along_every_axis(rccl: Path) -> None:
    def rank(control: Transport) -> list[float]:
        mesh = Mesh.from_transport(MixedTransport.over(control), pp=2, dp=2, tp=2)
        sums = []
        for group in (mesh.pp_group, mesh.dp_group, mesh.tp_group):
            own = torch.tensor([float(mesh.rank)])
            group.wait(group.iallreduce(own))
            sums.append(float(own))
        mesh.close()
        return sums

    assert run_ranks(8, rank)[5] == [1 + 5, 5 + 7, 4 + 5]
    with pytest.raises(MeshError, match="but 2 ranks"):
        run_ranks(2, lambda control: Mesh.from_transport(MixedTransport.over(control), pp=3))
