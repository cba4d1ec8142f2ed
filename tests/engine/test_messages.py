"""Tensors of every dtype, shape and layout arrive as they were sent, packed or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipert.comm.local import run_ranks
from pipert.engine.boundary import DTYPES, Handover
from pipert.engine.messages import (
    PACK_BYTES,
    Outgoing,
    finish_spec,
    pieces,
    receive_spec,
    receive_tensors,
    send_spec,
    send_tensors,
)
from pipert.errors import BoundaryError

NAMES = sorted(
    {str(d).removeprefix("torch.") for d in DTYPES.values()}
    & {
        *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool"),
        *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"),
    }
)


def make(name: str, shape: list[int], layout: str) -> torch.Tensor:
    dtype = DTYPES[name]
    raw = torch.randint(0, 2 if name == "bool" else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype)
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1)
    if layout == "expanded":
        return tensor.unsqueeze(0).expand(2, *tensor.shape)
    if layout == "conjugated" and tensor.is_complex():
        return tensor.conj()
    return tensor


TENSORS = st.builds(
    make,
    st.sampled_from(NAMES),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from(["plain", "transposed", "expanded", "conjugated"]),
)


def bits(tensor: torch.Tensor) -> bytes:
    dense = tensor.resolve_conj().resolve_neg() if tensor.is_complex() else tensor
    return dense.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def there_and_back(tensors: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """Send tensors from rank 0 to rank 1, sizes first."""
    spec = Handover.of(tensors)[0].spec

    def rank(transport: Any) -> list[torch.Tensor]:
        if transport.rank == 0:
            outgoing = Outgoing("0SEND_F0", 1)
            send_spec(transport, spec, 0, outgoing)
            send_tensors(transport, tensors, spec.tensors, 1, outgoing)
            for request in outgoing.requests:
                transport.wait(request)
            outgoing.check()
            return []
        told = finish_spec(transport, receive_spec(transport, 0, 0), "1RECV_META0", 0, 0)
        assert told == spec
        incoming = receive_tensors(transport, told.tensors, torch.device("cpu"), 0, 1)
        for request in incoming.requests:
            transport.wait(request)
        return incoming.tensors

    return run_ranks(2, rank, **options)[1]


@settings(max_examples=80)
@given(st.lists(TENSORS, max_size=6))
def test_every_bit_arrives(tensors: list[torch.Tensor]) -> None:
    arrived = there_and_back(tensors)
    assert [(t.shape, t.dtype, bits(t)) for t in arrived] == [(t.shape, t.dtype, bits(t)) for t in tensors]
    assert all(tensor.is_contiguous() for tensor in arrived)


def test_small_tensors_share_a_message_and_large_ones_have_their_own() -> None:
    tensors = [torch.ones(3), torch.ones(PACK_BYTES), torch.ones(0), torch.ones(5, dtype=torch.bool)]
    layout = pieces(Handover.of(tensors)[0].spec.tensors)
    assert [piece.indices for piece in layout] == [(1,), (0, 3)]
    arrived = there_and_back(tensors)
    assert all(torch.equal(a, b) for a, b in zip(arrived, tensors, strict=True))


def test_tensors_of_one_message_do_not_share_versions_or_bases() -> None:
    first, second = there_and_back([torch.ones(3), torch.ones(3)])
    version = second._version
    first.add_(1)
    assert not first._is_view()
    assert second._version == version


def test_a_specification_longer_than_one_message_arrives_whole() -> None:
    tensors = [torch.full((i,), i) for i in range(100)]
    assert len(Handover.of(tensors)[0].spec.encode()) > 2000
    assert all(torch.equal(a, b) for a, b in zip(there_and_back(tensors), tensors, strict=True))


def test_changing_a_tensor_while_it_is_being_sent_is_found_out() -> None:
    class Stuck:
        def isend(self, *_: object) -> Any:
            return self

    tensor = torch.ones(3)
    outgoing = Outgoing("1SEND_F3", 2)
    send_tensors(Stuck(), [tensor.detach()], Handover.of(tensor)[0].spec.tensors, 0, outgoing)  # type: ignore[arg-type]
    outgoing.check()
    tensor.add_(1)
    with pytest.raises(BoundaryError, match="1SEND_F3: a tensor was changed in place while it was being sent"):
        outgoing.check()
