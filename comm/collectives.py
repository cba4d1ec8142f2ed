"""Non-blocking collectives as small state machines over point-to-point messages.

Each is a generator that yields the request it waits for; `pipert.comm.wait.Progress` takes the steps. They need nothing
but ``isend`` and ``irecv`` with tags (`Channel`), so they run over any transport that matches by tag.

Sums are specified, not merely repeatable: an element of the result is ``((x0 + x1) + x2) + ...`` over the ranks in rank
order, for floats narrower than fp32 added in fp32 and rounded once. So the result has the same bits on every rank and
in every run, whatever the message size, the number of segments or the timing.

Large tensors are reduced pairwise: rank r owns part r, gets that part's values from every rank (as much traffic as a
ring, in the tensor's own dtype) and sends the result to all. The parts travel in segments, so that adding one overlaps
with moving the next. Small tensors are gathered whole and reduced everywhere, in ``ceil(log2(size))`` message steps
(Bruck et al., "Efficient algorithms for all-to-all communications", 1997) or in one, among few ranks.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pipert.comm.buffers import as_bytes
from pipert.comm.errors import MessageError
from pipert.comm.reduction import accumulation_dtype, check_reduction
from pipert.comm.transport import Request
from pipert.comm.wait import Steps

#: How many consecutive tags one collective uses.
TAGS = 2


class Channel(Protocol):
    """Messages among ``size`` ranks that only collectives use. The arguments are right already."""

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def isend(self, tensor: torch.Tensor, dest: int, tag: int, /) -> Request:
        """Start sending."""
        ...

    def irecv(self, tensor: torch.Tensor, source: int, tag: int, /) -> Request:
        """Start receiving."""
        ...


@dataclass(frozen=True)
class Cuts:
    """Where one algorithm gives way to another.

    Attributes:
        small: bytes of all ranks together up to which everything is gathered everywhere.
        segment: bytes of a segment of a large tensor; up to four times as many where there would be over eight.
        window: segments under way at a time.
        few: ranks up to which every rank sends to every other at once, instead of in Bruck's steps.
    """

    small: int = 1 << 16
    segment: int = 1 << 20
    window: int = 2
    few: int = 4


DEFAULT = Cuts()


def all_reduce(channel: Channel, tensor: torch.Tensor, op: str, tag: int, cuts: Cuts = DEFAULT) -> Steps:
    """Reduce a contiguous tensor in place over all ranks.

    Raises:
        MessageError: the dtype has no such reduction. Raised at the first step, before anything is sent.
    """
    check_arithmetic(tensor.dtype, op)
    flat = tensor.detach().view(-1)
    if channel.size == 1 or flat.numel() == 0:
        return
    if tensor.nbytes * channel.size > cuts.small:
        parts = list(flat.tensor_split(channel.size))
        yield from _reduce_parts(channel, parts, parts[channel.rank], op, tag, cuts, gather=True)
        return
    rows = torch.empty((channel.size, flat.numel()), dtype=flat.dtype, device=flat.device)
    rows[channel.rank].copy_(flat)
    yield from _gather_equal(channel, as_bytes(rows).view(channel.size, -1), tag, cuts)
    _reduce(flat, list(rows), op)


def reduce_scatter(channel: Channel, out: torch.Tensor, tensor: torch.Tensor, tag: int, cuts: Cuts = DEFAULT) -> Steps:
    """Sum ``tensor`` (``size`` parts like ``out``) over all ranks; rank r gets part r. ``out`` may be that part itself.

    Raises:
        MessageError: the dtype has no sum.
    """
    check_arithmetic(tensor.dtype, "sum")
    parts = list(tensor.detach().view(channel.size, -1))
    result = out.detach().view(-1)
    if channel.size == 1:
        if result.data_ptr() != parts[0].data_ptr():
            result.copy_(parts[0])
    elif result.numel():
        yield from _reduce_parts(channel, parts, result, "sum", tag, cuts, gather=False)


def all_gather(channel: Channel, out: torch.Tensor, tensor: torch.Tensor, tag: int, cuts: Cuts = DEFAULT) -> Steps:
    """Gather every rank's tensor (any dtype) into ``out``. ``tensor`` may be this rank's part of ``out`` itself."""
    rows = as_bytes(out).view(channel.size, -1)
    own = as_bytes(tensor)
    if own.data_ptr() != rows[channel.rank].data_ptr():
        rows[channel.rank].copy_(own)
    yield from _gather_equal(channel, rows, tag, cuts)


def broadcast(channel: Channel, tensor: torch.Tensor, root: int, tag: int, cuts: Cuts = DEFAULT) -> Steps:
    """Copy root's tensor (any dtype) into everybody's: down a binary tree, or large ones in parts over everybody."""
    flat = as_bytes(tensor)
    rank, size = channel.rank, channel.size
    if size == 1 or flat.numel() == 0:
        return
    if size == 2 or flat.numel() <= cuts.small:
        yield from _broadcast_tree(channel, flat, root, tag)
        return
    parts = flat.tensor_split(size)
    others = [(rank + distance) % size for distance in range(1, size)]
    if rank == root:
        sends = [channel.isend(parts[peer], peer, tag) for peer in others]
    else:
        yield channel.irecv(parts[rank], root, tag)
        sends = []
    sends += [channel.isend(parts[rank], peer, tag + 1) for peer in others if peer != root]
    receives = [channel.irecv(parts[peer], peer, tag + 1) for peer in others] if rank != root else []
    yield from receives + sends


def exchange(channel: Channel, blob: bytes, tag: int, cuts: Cuts = DEFAULT) -> Generator[Request, None, list[bytes]]:
    """Give every rank everybody's blob, in rank order.

    Returns:
        The blobs, as the generator's value.
    """
    rank, size = channel.rank, channel.size
    lengths = torch.zeros(size, dtype=torch.int64)
    lengths[rank] = len(blob)
    yield from _gather_equal(channel, as_bytes(lengths).view(size, -1), tag, cuts)
    longest = max(lengths.tolist())
    padded = longest * size <= cuts.small
    rows = [torch.empty(longest if padded else length, dtype=torch.uint8) for length in lengths.tolist()]
    if padded:
        rows = list(torch.empty((size, longest), dtype=torch.uint8))
    if blob:
        rows[rank][: len(blob)] = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
    if padded and longest:
        table = rows[0]._base
        assert table is not None
        yield from _gather_equal(channel, table, tag, cuts)
    elif longest:
        yield from _gather_direct(channel, rows, tag)
    return [row.numpy().tobytes()[:length] for row, length in zip(rows, lengths.tolist(), strict=True)]


def check_arithmetic(dtype: torch.dtype, op: str) -> None:
    """Refuse reductions that have no meaning or that torch has no arithmetic for.

    Raises:
        MessageError: naming what to use instead.
    """
    check_reduction(dtype, op)
    known = dtype.is_floating_point and dtype.itemsize >= 1 and dtype != torch.float4_e2m1fn_x2
    signed = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    if not (known or dtype in signed or dtype in (torch.complex64, torch.complex128)):
        raise MessageError(f"torch cannot compute with {dtype}; reduce a view or a copy of another dtype")


def _reduce_parts(
    channel: Channel,
    parts: Sequence[torch.Tensor],
    result: torch.Tensor,
    op: str,
    tag: int,
    cuts: Cuts,
    *,
    gather: bool,
) -> Steps:
    """Reduce part r on rank r, pairwise and in segments; with ``gather`` also bring every reduced part into ``parts``.

    A part's memory receives its reduced segment only after the raw segment has left.
    """
    rank, size = channel.rank, channel.size
    peers = [(rank + distance) % size for distance in range(1, size)]
    nbytes = max(cuts.segment, min(4 * cuts.segment, parts[0].nbytes // 8 // cuts.segment * cuts.segment))
    length = max(1, nbytes // result.itemsize // max(1, size // 4))
    segments = [torch.split(part, length) for part in parts]
    mine, results = segments[rank], torch.split(result, length)
    steps = max(map(len, segments))
    inbox = torch.empty((min(cuts.window, steps), size, mine[0].numel()), dtype=result.dtype, device=result.device)
    scratch = _scratch(mine[0], size)
    receives: dict[int, list[Request]] = {}
    sends: dict[int, list[tuple[int, Request]]] = {}

    def arrivals(step: int) -> list[torch.Tensor]:
        slot = inbox[step % len(inbox), :, : mine[step].numel()]
        return [mine[step] if peer == rank else slot[peer] for peer in range(size)]

    def post(step: int) -> None:
        if step < len(mine):
            boxes = arrivals(step)
            receives[step] = [channel.irecv(boxes[peer], peer, tag) for peer in reversed(peers)]
        there = [peer for peer in peers if step < len(segments[peer])]
        sends[step] = [(peer, channel.isend(segments[peer][step], peer, tag)) for peer in there]

    for step in range(min(cuts.window, steps)):
        post(step)
    last: list[Request] = []
    for step in range(steps):
        if step < len(mine):
            yield from receives.pop(step)
            _reduce(results[step], arrivals(step), op, scratch)
            if gather:
                last += [channel.isend(results[step], peer, tag + 1) for peer in peers]
        for peer, sent in sends.pop(step):
            yield sent
            if gather:
                last.append(channel.irecv(segments[peer][step], peer, tag + 1))
        if step + cuts.window < steps:
            post(step + cuts.window)
    yield from last


def _scratch(like: torch.Tensor, size: int) -> torch.Tensor | None:
    """Room for the running total of one segment, where `_reduce` needs it."""
    dtype = accumulation_dtype(like.dtype)
    return torch.empty_like(like, dtype=dtype) if size > 2 or (like.itemsize < 2 and dtype != like.dtype) else None


def _reduce(result: torch.Tensor, rows: Sequence[torch.Tensor], op: str, scratch: torch.Tensor | None = None) -> None:
    """Reduce the rows in order into ``result``, which may be one of them."""
    combine = torch.add if op == "sum" else torch.maximum
    total, dtype = rows[0], accumulation_dtype(result.dtype)
    if scratch is None:
        scratch = _scratch(result, len(rows))
    room = result if scratch is None else scratch[: result.numel()]
    if scratch is not None and dtype != result.dtype:
        total = room.copy_(rows[0])
        for row in rows[1:]:
            combine(total, row.to(dtype), out=room)
        result.copy_(room)
        return
    for row in rows[1:-1]:
        total = combine(total, row, out=room)
    combine(total, rows[-1], out=result)


def _gather_equal(channel: Channel, rows: torch.Tensor, tag: int, cuts: Cuts) -> Steps:
    """Fill in everybody's row of a byte matrix; this rank's own row is there already."""
    if channel.size == 1 or rows.numel() == 0:
        return
    if channel.size <= cuts.few or rows.numel() > cuts.small:
        yield from _gather_direct(channel, list(rows), tag)
        return
    rank, size = channel.rank, channel.size
    turned = torch.empty_like(rows)  # row i: of rank (rank + i) % size
    turned[0].copy_(rows[rank])
    have = 1
    while have < size:
        count = min(have, size - have)
        arrived = channel.irecv(turned[have : have + count], (rank + have) % size, tag)
        sent = channel.isend(turned[:count], (rank - have) % size, tag)
        yield arrived
        yield sent
        have += count
    rows[rank:].copy_(turned[: size - rank])
    rows[:rank].copy_(turned[size - rank :])


def _gather_direct(channel: Channel, rows: Sequence[torch.Tensor], tag: int) -> Steps:
    """Send this rank's row to everybody and receive theirs, all at once."""
    rank, size = channel.rank, channel.size
    peers = [(rank + distance) % size for distance in range(1, size)]
    receives = [channel.irecv(rows[peer], peer, tag) for peer in reversed(peers)]
    sends = [channel.isend(rows[rank], peer, tag) for peer in peers]
    yield from receives
    yield from sends


def _broadcast_tree(channel: Channel, flat: torch.Tensor, root: int, tag: int) -> Steps:
    """Double the number of ranks that have the tensor in every step."""
    size = channel.size
    place = (channel.rank - root) % size
    reach = 1
    if place:
        while reach * 2 <= place:
            reach *= 2
        yield channel.irecv(flat, (place - reach + root) % size, tag)
        reach *= 2
    sends = []
    while place + reach < size:
        sends.append(channel.isend(flat, (place + reach + root) % size, tag))
        reach *= 2
    yield from sends
