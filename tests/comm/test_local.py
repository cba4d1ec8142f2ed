"""The local transport: what it moves and what it refuses."""

from __future__ import annotations

import sys
import time
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipert.comm.errors import HangError, MessageError
from pipert.comm.faults import Faults
from pipert.comm.local import run_ranks
from pipert.comm.local_transport import LocalTransport

pytestmark = pytest.mark.usefixtures("no_thread_is_left_behind")


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]


def random_bytes_as(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Any bits, NaN payloads included; bools are 0 or 1."""
    tensor = torch.empty(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    tensor.view(-1).view(torch.uint8).random_(0, high, generator=generator)
    return tensor


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_arrives_bit_for_bit(dtype: torch.dtype, buffered: bool) -> None:
    shapes = [(), (0,), (3, 0, 2), (1,), (5, 7)]
    sent = [random_bytes_as(dtype, shape, seed) for seed, shape in enumerate(shapes)]

    def fn(transport: LocalTransport) -> list[bytes]:
        if transport.rank == 0:
            for tag, tensor in enumerate(sent):
                transport.wait(transport.isend(tensor, 1, tag))
            return []
        received = [torch.empty_like(tensor) for tensor in sent]
        for tag, tensor in enumerate(received):
            transport.wait(transport.irecv(tensor, 0, tag))
        return [bits(tensor) for tensor in received]

    assert run_ranks(2, fn, buffered=buffered)[1] == [bits(tensor) for tensor in sent]


@pytest.mark.parametrize(
    ("tensor", "complaint"),
    [
        (torch.zeros(4, 4).t()[:, :2], "not contiguous"),
        (torch.zeros(1).expand(3), "not contiguous"),
        (torch.zeros(2, 2).to_sparse(), "no dense memory"),
        (torch.zeros(2, device="meta"), "no dense memory"),
        (torch.zeros(2, dtype=torch.complex64).conj(), "resolve_conj"),
        ([1.0, 2.0], "must be a torch.Tensor"),
    ],
    ids=["strided", "expanded", "sparse", "meta", "conjugated", "list"],
)
def test_what_is_not_one_dense_piece_of_memory_is_refused(tensor: torch.Tensor, complaint: str) -> None:
    def fn(transport: LocalTransport) -> None:
        for start in (transport.isend, transport.irecv):
            with pytest.raises(MessageError, match=complaint):
                start(tensor, 0, 0)
        for start in (transport.iallreduce, lambda t: transport.ibroadcast(t, 0), lambda t: transport.iallgather(t, t)):
            with pytest.raises((MessageError, AttributeError)):
                start(tensor)

    run_ranks(1, fn)


def test_ranks_and_tags_out_of_bounds_are_refused_with_the_bounds() -> None:
    def fn(transport: LocalTransport) -> None:
        tensor = torch.zeros(1)
        with pytest.raises(MessageError, match=r"dest = 2 is not a rank of this group of 2; use 0 to 1"):
            transport.isend(tensor, 2, 0)
        with pytest.raises(MessageError, match=r"source = -1 is not a rank"):
            transport.irecv(tensor, -1, 0)
        with pytest.raises(MessageError, match=r"tag = 32767 is out of bounds; this transport takes 0 <= tag < 32767"):
            transport.isend(tensor, 0, 32767)
        with pytest.raises(MessageError, match=r"tag = -1"):
            transport.isend(tensor, 0, -1)
        with pytest.raises(MessageError, match=r"tag = 1.5"):
            transport.isend(tensor, 0, 1.5)  # type: ignore[arg-type]
        with pytest.raises(MessageError, match=r"root = 'a'"):
            transport.ibroadcast(tensor, "a")  # type: ignore[arg-type]

    run_ranks(2, fn, tag_bound=32767)


def test_a_message_to_oneself_arrives() -> None:
    def fn(transport: LocalTransport) -> float:
        into = torch.zeros(1)
        send, receive = transport.isend(torch.ones(1), 0, 3), transport.irecv(into, 0, 3)
        transport.wait(send)
        transport.wait(receive)
        return into.item()

    assert run_ranks(1, fn) == [1.0]


def test_parameters_that_need_gradients_are_sent_and_received_outside_autograd() -> None:
    def fn(transport: LocalTransport) -> bool:
        parameter = torch.nn.Parameter(torch.full((3,), float(transport.rank)))
        transport.wait(transport.ibroadcast(parameter, 1))
        transport.wait(transport.iallreduce(parameter))
        return parameter.is_leaf and parameter.grad_fn is None and parameter.tolist() == [2.0, 2.0, 2.0]

    assert run_ranks(2, fn) == [True, True]


def test_autograd_runs_in_every_rank_thread() -> None:
    def fn(transport: LocalTransport) -> float:
        x = torch.tensor(float(transport.rank), requires_grad=True)
        (x * x).backward()
        assert x.grad is not None
        transport.wait(transport.iallreduce(x.grad))
        return x.grad.item()

    assert run_ranks(4, fn) == [12.0] * 4


def test_a_rendezvous_send_is_complete_only_when_its_receive_is_posted() -> None:
    def fn(transport: LocalTransport) -> list[bool]:
        if transport.rank == 0:
            request = transport.isend(torch.ones(1), 1, 0)
            before = request.test()
            transport.barrier()
            transport.barrier()
            return [before, request.test()]
        transport.barrier()
        transport.wait(transport.irecv(torch.zeros(1), 0, 0))
        transport.barrier()
        return []

    assert run_ranks(2, fn)[0] == [False, True]
    assert run_ranks(2, fn, buffered=True)[0] == [True, True]


def test_a_sender_that_changes_its_tensor_too_early_is_exposed_by_rendezvous_but_not_by_buffers() -> None:
    def fn(transport: LocalTransport) -> float:
        tensor = torch.ones(1)
        if transport.rank == 0:
            request = transport.isend(tensor, 1, 0)
            tensor.fill_(7.0)  # the mistake
            transport.barrier()
            transport.wait(request)
        else:
            transport.barrier()
            transport.wait(transport.irecv(tensor, 0, 0))
        return tensor.item()

    assert run_ranks(2, fn)[1] == 7.0
    assert run_ranks(2, fn, buffered=True)[1] == 1.0


def test_a_receive_read_before_it_is_complete_shows_nan() -> None:
    def fn(transport: LocalTransport) -> list[float]:
        tensor = torch.ones(1)
        if transport.rank == 0:
            transport.barrier()
            transport.wait(transport.isend(tensor, 1, 0))
            return []
        request = transport.irecv(tensor, 0, 0)
        early = tensor.item()
        transport.barrier()
        transport.wait(request)
        return [early, tensor.item()]

    early, late = run_ranks(2, fn)[1]
    assert early != early
    assert late == 1.0


def test_a_complete_request_keeps_no_tensor_alive() -> None:
    def fn(transport: LocalTransport) -> bool:
        tensor = torch.ones(1000)
        other = 1 - transport.rank
        message = transport.isend(tensor, other, 0) if transport.rank else transport.irecv(tensor, other, 0)
        reduction = transport.iallreduce(tensor)
        transport.wait(message)
        transport.wait(reduction)
        storage = weakref.ref(tensor.untyped_storage())
        alive = weakref.ref(tensor)
        del tensor
        return message.test() and reduction.test() and alive() is None and storage() is None

    assert run_ranks(2, fn) == [True, True]


def test_matched_by_order_two_swapped_messages_of_equal_size_land_in_each_others_place() -> None:
    """The silent swap on NCCL and RCCL that the verifier protects from: no error, wrong numbers."""

    def fn(transport: LocalTransport) -> list[float]:
        first, second = torch.tensor([1.0]), torch.tensor([2.0])
        if transport.rank == 0:
            requests = [transport.isend(first, 1, 1), transport.isend(second, 1, 2)]
        else:
            requests = [transport.irecv(second, 0, 2), transport.irecv(first, 0, 1)]
        for request in requests:
            transport.wait(request)
        return [first.item(), second.item()]

    assert run_ranks(2, fn, matching="tag")[1] == [1.0, 2.0]
    assert run_ranks(2, fn, matching="order")[1] == [2.0, 1.0]


def test_matched_by_order_a_size_mismatch_is_an_error_on_every_rank() -> None:
    def fn(transport: LocalTransport) -> None:
        small, large = torch.zeros(1), torch.zeros(2)
        if transport.rank == 0:
            requests = [transport.isend(small, 1, 1), transport.isend(large, 1, 2)]
        else:
            requests = [transport.irecv(large, 0, 2), transport.irecv(small, 0, 1)]
        for request in requests:
            transport.wait(request)

    complaint = r"rank 0 sends 4 bytes \(tag 1\) where rank 1 receives 8 bytes \(tag 2\), matched by order"
    with pytest.raises(MessageError, match=complaint):
        run_ranks(2, fn, matching="order")
    outcomes = run_ranks(2, fn, matching="order", return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [MessageError, MessageError]
    assert run_ranks(2, fn, matching="tag") == [None, None]


@pytest.mark.parametrize(
    ("channel", "hangs"), [("message", False), ("direction", False), ("pair", True), ("rank", True)]
)
def test_two_ranks_that_both_send_first_hang_where_send_and_receive_share_a_channel(channel: str, hangs: bool) -> None:
    def fn(transport: LocalTransport) -> float:
        other = 1 - transport.rank
        into = torch.zeros(1)
        requests = [transport.isend(torch.ones(1), other, 0), transport.irecv(into, other, 0)]
        for request in requests:
            transport.wait(request)
        return into.item()

    if hangs:
        with pytest.raises(HangError, match=r"rank 0 waits in send to rank 1, tag 0"):
            run_ranks(2, fn, matching="order", channel=channel)  # type: ignore[arg-type]
    else:
        assert run_ranks(2, fn, matching="order", channel=channel) == [1.0, 1.0]  # type: ignore[arg-type]
    assert run_ranks(2, fn, buffered=True, matching="order", channel=channel) == [1.0, 1.0]  # type: ignore[arg-type]


def test_blocking_sends_hang_where_nonblocking_ones_do_not() -> None:
    def fn(transport: LocalTransport) -> None:
        other = 1 - transport.rank
        send = transport.isend(torch.ones(1), other, 0)
        transport.wait(transport.irecv(torch.zeros(1), other, 0))
        transport.wait(send)

    run_ranks(2, fn)
    run_ranks(2, fn, blocking=True, buffered=True)
    with pytest.raises(HangError, match="send to rank 1, tag 0"):
        run_ranks(2, fn, blocking=True)


def test_on_a_rank_channel_collectives_queue_with_the_messages() -> None:
    def fn(transport: LocalTransport) -> None:
        tensor = torch.ones(1)
        if transport.rank == 0:
            requests = [transport.isend(tensor, 1, 0), transport.iallreduce(torch.ones(1))]
        else:
            requests = [transport.iallreduce(torch.ones(1)), transport.irecv(tensor, 0, 0)]
        for request in requests:
            transport.wait(request)

    run_ranks(2, fn, channel="pair")
    with pytest.raises(HangError, match=r"not yet entered by rank 0"):
        run_ranks(2, fn, channel="rank")


@st.composite
def patterns(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int]]]:
    """A size and messages (source, dest, tag), in an order that every rank posts its own part of."""
    size = draw(st.integers(1, 5))
    rank = st.integers(0, size - 1)
    return size, draw(st.lists(st.tuples(rank, rank, st.integers(0, 2)), max_size=24))


@settings(max_examples=150, deadline=None)
@given(
    patterns(),
    st.randoms(use_true_random=False),
    st.booleans(),
    st.sampled_from(["tag", "order"]),
    st.from_type(Faults),
)
def test_random_messages_meet_as_a_queue_per_pair_and_tag_says(pattern, shuffler, buffered, matching, faults) -> None:
    size, messages = pattern
    sends = [[m for m in enumerate(messages) if m[1][0] == rank] for rank in range(size)]
    receives = [[m[1] for m in enumerate(messages) if m[1][1] == rank] for rank in range(size)]
    for posted in receives:
        shuffler.shuffle(posted)  # order of posting is free: it decides who gets what, which the model says too
    waits = [shuffler.random() for _ in range(size)]

    def key(source: int, dest: int, tag: int) -> tuple[int, ...]:
        return (source, dest, tag) if matching == "tag" else (source, dest)

    queues: dict[tuple[int, ...], list[int]] = {}
    for rank in range(size):
        for number, message in sends[rank]:
            queues.setdefault(key(*message), []).append(number)
    expected = [[queues[key(*message)].pop(0) for message in posted] for posted in receives]

    def fn(transport: LocalTransport) -> list[int]:
        into = [torch.full((2,), -5, dtype=torch.int64) for _ in receives[transport.rank]]
        requests = [
            transport.irecv(tensor, source, tag)
            for tensor, (source, _, tag) in zip(into, receives[transport.rank], strict=True)
        ]
        for number, (_, dest, tag) in sends[transport.rank]:
            requests.append(transport.isend(torch.tensor([number, number]), dest, tag))
        if waits[transport.rank] < 0.5:
            requests.reverse()
        for request in requests:
            transport.wait(request)
        return [int(tensor[0]) for tensor in into if int(tensor[0]) == int(tensor[1])]

    assert run_ranks(size, fn, buffered=buffered, matching=matching, faults=faults) == expected


def test_forty_ranks_pass_a_ring_a_hundred_times_in_seconds() -> None:
    def fn(transport: LocalTransport) -> float:
        value, into = torch.tensor([float(transport.rank)]), torch.zeros(1)
        right, left = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
        for step in range(100):
            requests = [transport.irecv(into, left, step), transport.isend(value, right, step)]
            for request in requests:
                transport.wait(request)
            value, into = into, value
        return value.item()

    start = time.monotonic()
    assert run_ranks(40, fn) == [float((rank - 100) % 40) for rank in range(40)]
    assert time.monotonic() - start < 10.0


def test_ten_thousand_messages_queued_behind_one_complete_without_recursion() -> None:
    count = 10 * sys.getrecursionlimit()

    def fn(transport: LocalTransport) -> None:
        if transport.rank == 0:
            requests = [transport.isend(torch.zeros(0), 1, 0) for _ in range(count)]
            transport.barrier()
        else:
            transport.barrier()
            requests = [transport.irecv(torch.zeros(0), 0, 0) for _ in range(count)]
        for request in requests:
            transport.wait(request)

    run_ranks(2, fn, channel="pair")
