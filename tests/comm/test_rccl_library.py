"""The binding of librccl: how it is found, its errors, and what its functions promise, on the stand-in."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from pipert.comm import rccl_library
from pipert.comm.errors import TransportError
from pipert.comm.rccl_library import Library, RcclError, find_library
from pipert.comm.reduction import reduce_in_order

TYPES = {
    torch.int8: "ncclInt8",
    torch.uint8: "ncclUint8",
    torch.int32: "ncclInt32",
    torch.int64: "ncclInt64",
    torch.float16: "ncclFloat16",
    torch.bfloat16: "ncclBfloat16",
    torch.float32: "ncclFloat32",
    torch.float64: "ncclFloat64",
}


def until(done: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.001)
    return done()


class Ranks:
    """Several ranks of one communicator in this process, each with a stream."""

    def __init__(self, library: Library, count: int) -> None:
        identity = library.unique_id()
        self.library = library
        self._kept: list[Any] = []  # the tensors: operations go on in the background
        self.functions = library.functions
        self.comms = [library.init(count, identity, rank)[0] for rank in range(count)]
        assert until(self.ready)
        self.streams = [self.functions.pipertStreamCreate() for _ in self.comms]

    def ready(self) -> bool:
        return all(self.library.ready(comm) for comm in self.comms)

    def call(self, name: str, rank: int, *arguments: Any) -> None:
        self._kept.append(arguments)
        plain = [self.at(a) if isinstance(a, torch.Tensor) else a for a in arguments]
        self.library.call(name, *plain, self.comms[rank], self.streams[rank])

    def at(self, tensor: torch.Tensor) -> Any:
        return self.library.ffi.cast("void *", tensor.data_ptr())

    def send(self, rank: int, tensor: torch.Tensor, peer: int) -> None:
        self.call("ncclSend", rank, tensor, tensor.nbytes, self.functions.ncclUint8, peer)

    def receive(self, rank: int, tensor: torch.Tensor, peer: int) -> None:
        self.call("ncclRecv", rank, tensor, tensor.nbytes, self.functions.ncclUint8, peer)

    def over(self, rank: int) -> bool:
        mark = self.functions.pipertStreamMark(self.streams[rank])
        return bool(self.functions.pipertStreamReached(self.streams[rank], mark))

    def all_over(self) -> bool:
        return all(self.over(rank) for rank in range(len(self.comms)))

    def fault(self, what: str, nth: int, seconds: float = 0.0) -> None:
        ffi = self.library.ffi.__class__()
        ffi.cdef("void standinFault(char what, long long nth, double seconds);")
        ffi.dlopen(self.library.path).standinFault(what.encode(), nth, seconds)

    def abort(self) -> None:
        for comm in self.comms:
            self.functions.ncclCommAbort(comm)
        assert until(self.all_over)


@pytest.fixture
def library(standin: Path) -> Library:
    return Library(str(standin))


@pytest.fixture
def pair(library: Library) -> Iterator[Ranks]:
    ranks = Ranks(library, 2)
    yield ranks
    ranks.fault("\0", 0)
    ranks.abort()


# ---- finding and loading --------------------------------------------------------------------------------------------


def test_the_variable_goes_before_what_torch_has_mapped_and_that_before_the_loader(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 08:01 42   /opt/torch/lib/libtorch_cuda.so\n"
        "7f02-7f03 r-xp 00000000 08:01 43   /opt/torch/lib/librccl.so.1.0.60000\n"
    )
    assert find_library({"PIPERT_RCCL": "/own/librccl.so"}, maps) == "/own/librccl.so"
    assert find_library({}, maps) == "/opt/torch/lib/librccl.so.1.0.60000"
    maps.write_text("7f02-7f03 r-xp 00000000 08:01 43   /site-packages/nvidia/nccl/lib/libnccl.so.2\n")
    assert find_library({}, maps) == "/site-packages/nvidia/nccl/lib/libnccl.so.2"


def test_a_library_that_is_mapped_already_is_the_one_that_is_used(standin: Path) -> None:
    script = (
        "import ctypes, sys; ctypes.CDLL(sys.argv[1])\n"
        "from pipert.comm.rccl_library import Library, find_library\n"
        "print(find_library({}), Library(find_library({})))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(standin)], capture_output=True, text=True, check=True)
    assert done.stdout == f"{standin} RCCL 2.18.0: {standin}\n"


def test_where_there_is_no_library_the_refusal_says_what_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rccl_library, "NAMES", ("libno-such-rccl.so.1",))
    with pytest.raises(TransportError, match=r"no RCCL or NCCL library.*libno-such-rccl\.so\.1.*PIPERT_RCCL"):
        find_library({}, tmp_path / "none")
    with pytest.raises(TransportError, match=r"/no/such cannot be loaded.*PIPERT_RCCL"):
        Library("/no/such")
    with pytest.raises(TransportError, match="neither RCCL nor NCCL"):
        Library("libm.so.6")


def test_a_library_that_is_too_old_is_refused(standin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Library(str(standin)).version == (2, 18, 0)
    monkeypatch.setattr(rccl_library, "OLDEST", (2, 19, 0))
    with pytest.raises(TransportError, match=r"is version 2\.18\.0, pipert needs 2\.19\.0"):
        Library(str(standin))


def test_every_error_has_its_name_and_a_remedy(library: Library) -> None:
    names = ["ncclUnhandledCudaError", "ncclSystemError", "ncclInternalError", "ncclInvalidArgument"]
    names += ["ncclInvalidUsage", "ncclRemoteError"]
    for number, name in enumerate(names, 1):
        error = library.error(number, "ncclSend")
        assert error.result == name and f"ncclSend: {name}: " in str(error) and "; " in str(error)
    assert library.error(77, "x").result == "ncclResult_t 77"
    with pytest.raises(RcclError, match="ncclCommInitRankConfig, rank 2 of 2 joining,: ncclInvalidArgument"):
        library.init(2, library.unique_id(), 2)


def test_ids_differ(library: Library) -> None:
    ids = {library.unique_id() for _ in range(20)}
    assert len(ids) == 20 and all(len(identity) == 128 for identity in ids)


@pytest.mark.skipif(find_spec("nvidia") is None or find_spec("nvidia.nccl") is None, reason="no nvidia-nccl installed")
def test_the_binding_fits_the_real_library() -> None:
    folder = Path(find_spec("nvidia.nccl").submodule_search_locations[0])
    library = Library(str(folder / "lib" / "libnccl.so.2"))
    assert library.version >= (2, 18, 0) and not library.own_streams
    assert len(library.unique_id()) == 128 and library.unique_id() != library.unique_id()
    assert "unhandled cuda error" in str(library.error(1, "x"))
    assert library.error(5, "x").result == "ncclInvalidUsage"
    if not torch.cuda.is_available():
        with pytest.raises(RcclError) as caught:
            comm = library.init(1, library.unique_id(), 0)
            until(lambda: library.ready(comm[0]))
        assert caught.value.result == "ncclUnhandledCudaError", caught.value


# ---- messages -------------------------------------------------------------------------------------------------------


def test_a_send_is_complete_only_when_its_receive_has_come(pair: Ranks) -> None:
    sent, got = torch.arange(5), torch.zeros(5, dtype=torch.int64)
    pair.send(0, sent, 1)
    assert not until(lambda: pair.over(0), 0.1)
    pair.receive(1, got, 0)
    assert until(pair.all_over) and torch.equal(got, sent)


def test_messages_that_cross_wait_for_ever_alone_and_pass_in_a_group(pair: Ranks) -> None:
    mine, got = [torch.full((300_000,), float(rank)) for rank in (0, 1)], [torch.zeros(300_000) for _ in (0, 1)]
    for rank in (0, 1):
        pair.library.call("ncclGroupStart")
        pair.send(rank, mine[rank], 1 - rank)
        pair.receive(rank, got[rank], 1 - rank)
        pair.library.call("ncclGroupEnd")
    assert until(pair.all_over) and got[0][-1] == 1 and (got[1] == 0).all()
    for rank in (0, 1):
        pair.send(rank, mine[rank], 1 - rank)
        pair.receive(rank, got[rank], 1 - rank)
    assert not until(pair.all_over, 0.2)


def test_a_group_starts_only_whole(pair: Ranks) -> None:
    got = torch.zeros(2)
    pair.library.call("ncclGroupStart")
    pair.send(0, torch.ones(1), 1)
    pair.receive(1, got[:1], 0)
    assert pair.all_over() and got[0] == 0
    pair.library.call("ncclGroupEnd")
    assert until(pair.all_over) and got[0] == 1


def test_messages_of_one_pair_meet_in_order_whoever_they_were_meant_for(pair: Ranks) -> None:
    first, second = torch.ones(3), torch.full((3,), 2.0)
    for_second, for_first = torch.zeros(3), torch.zeros(3)
    pair.send(0, first, 1), pair.send(0, second, 1)
    pair.receive(1, for_second, 0), pair.receive(1, for_first, 0)
    assert until(pair.all_over)
    assert (for_second == 1).all() and (for_first == 2).all()  # swapped, without an error


def test_halves_of_different_sizes_are_an_error(pair: Ranks) -> None:
    pair.send(0, torch.ones(3), 1)
    pair.receive(1, torch.zeros(4), 0)
    assert until(pair.all_over)
    with pytest.raises(RcclError, match="rank 0 sends 12 x type 1, rank 1 receives 16 x type 1"):
        pair.ready()


def test_a_message_longer_than_any_buffer_arrives_whole(pair: Ranks) -> None:
    sent = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    got = torch.zeros_like(sent)
    pair.receive(1, got[:-3], 0), pair.receive(1, got[-3:], 0)
    pair.send(0, sent[:-3], 1), pair.send(0, sent[-3:], 1)
    assert until(pair.all_over) and torch.equal(sent, got)


@pytest.mark.slow
def test_a_message_of_more_than_two_gibibytes_arrives_whole(pair: Ranks) -> None:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if free < 7 * 2**30:
        pytest.skip(f"needs 7 GiB of free memory, there are {free / 2**30:.1f}")
    sent, got = torch.full((2**31 + 16,), 7, dtype=torch.uint8), torch.zeros(2**31 + 16, dtype=torch.uint8)
    sent[2**31 - 1], sent[2**31], sent[-1] = 1, 2, 3
    pair.send(0, sent, 1), pair.receive(1, got, 0)
    assert until(pair.all_over, 120) and torch.equal(sent, got)


# ---- collectives ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("op", "name"), [("sum", "ncclSum"), ("max", "ncclMax")])
def test_sums_and_maxima_of_all_dtypes_are_those_of_torch(library: Library, dtype: Any, op: str, name: str) -> None:
    ranks = Ranks(library, 3)
    generator = torch.Generator().manual_seed(7)
    parts = [(torch.randn(70_001, generator=generator) * 9).to(dtype) for _ in range(3)]
    if dtype is torch.uint8:
        parts = [torch.randint(0, 80, (70_001,), generator=generator).to(dtype) for _ in range(3)]
    wanted = reduce_in_order(parts, op)
    for rank, part in enumerate(parts):
        kind, what = getattr(ranks.functions, TYPES[dtype]), getattr(ranks.functions, name)
        ranks.call("ncclAllReduce", rank, part, part, part.numel(), kind, what)
    assert until(ranks.all_over) and ranks.ready()
    assert all(torch.equal(part, wanted) for part in parts)


def test_sums_in_bf16_are_rounded_once(library: Library) -> None:
    ranks = Ranks(library, 3)
    parts = [torch.tensor([1 / 3, 85.3333], dtype=torch.bfloat16) for _ in range(3)]
    wanted = torch.stack(parts).float().sum(0).to(torch.bfloat16)
    for rank, part in enumerate(parts):
        functions = ranks.functions
        ranks.call("ncclAllReduce", rank, part, part, 2, functions.ncclBfloat16, functions.ncclSum)
    assert until(ranks.all_over) and torch.equal(parts[2], wanted)


def test_ranks_in_different_collectives_are_an_error(pair: Ranks) -> None:
    x, functions = torch.ones(4), pair.functions
    pair.call("ncclAllReduce", 0, x, x, 4, functions.ncclFloat32, functions.ncclSum)
    pair.call("ncclAllGather", 1, x[:2], x, 2, functions.ncclFloat32)
    assert until(pair.all_over)
    with pytest.raises(RcclError, match=r"all-(reduce|gather) of \d"):
        pair.ready()


def test_communicators_divide_by_color_and_key(library: Library) -> None:
    ranks = Ranks(library, 5)
    colors, keys = [0, 1, 0, None, 0], [3, 0, 2, 0, 1]
    parts = [library.split(comm, colors[rank], keys[rank]) for rank, comm in enumerate(ranks.comms)]
    assert parts[3] is None
    there = [part for part in parts if part is not None]
    assert until(ranks.ready) and all(library.ready(part[0]) for part in there)
    whole = torch.zeros(3, 3, dtype=torch.int32)
    for place, rank in enumerate([4, 2, 0]):  # by key
        own = torch.tensor([rank], dtype=torch.int32)
        ranks.comms[rank] = parts[rank][0]
        ranks.call("ncclAllGather", rank, own, whole[place], 1, ranks.functions.ncclInt32)
    assert until(ranks.all_over)
    assert whole.tolist() == [[4, 2, 0]] * 3


# ---- failures -------------------------------------------------------------------------------------------------------


def test_an_abort_ends_the_waits_of_the_other_rank(pair: Ranks) -> None:
    pair.receive(1, torch.zeros(3), 0)
    pair.functions.ncclCommAbort(pair.comms[0])
    assert until(pair.all_over)
    with pytest.raises(RcclError, match=r"ncclRemoteError.*another rank"):
        pair.library.ready(pair.comms[1])
    with pytest.raises(RcclError, match="ncclRemoteError"):
        pair.receive(1, torch.zeros(3), 0)


def test_an_injected_error_is_told_by_the_communicator(pair: Ranks) -> None:
    pair.fault("e", 1)
    got = torch.zeros(2)
    pair.send(0, torch.ones(1), 1)
    pair.receive(1, got[:1], 0)
    assert until(lambda: pair.over(0) or pair.over(1))
    with pytest.raises(RcclError, match=r"ncclSystemError: .*the network went away.*NCCL_SOCKET_IFNAME"):
        pair.ready()


def test_a_part_has_no_handle_before_the_whole_communicator_is_ready_again(library: Library) -> None:
    """As in NCCL, whose background thread writes it at the end; a transport must neither read nor free it earlier."""
    ranks = Ranks(library, 2)
    place = library.split(ranks.comms[0], 0, 0)
    assert not until(lambda: library.ready(ranks.comms[0]), 0.05)
    assert place[0] == library.ffi.NULL
    other = library.split(ranks.comms[1], 0, 1)
    assert until(ranks.ready) and place[0] != library.ffi.NULL
    assert until(lambda: library.ready(place[0]) and library.ready(other[0]))
