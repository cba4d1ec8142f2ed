"""The MPI transport on real ranks: bits, sizes, tags, refusals, collectives, groups."""

from __future__ import annotations

import os
import sys

import pytest

from tests.mpi_harness import run_mpi

pytestmark = pytest.mark.mpi


def test_messages_of_every_dtype_and_shape_arrive_bit_for_bit() -> None:
    run_mpi(
        2,
        """
        import torch
        from pipert.comm.mpi import MpiTransport
        transport = MpiTransport.world()
        other = 1 - transport.rank
        dtypes = {v for v in vars(torch).values() if isinstance(v, torch.dtype)}
        tried = 0
        for tag, dtype in enumerate(sorted(dtypes, key=str)):
            for shape in [(), (0,), (1,), (3, 0, 2), (5, 7), (3000,)]:
                try:
                    like = torch.empty(shape, dtype=dtype)
                    bits = torch.randint(0, 256, (like.nbytes,), generator=torch.Generator().manual_seed(tag))
                    bits = bits.to(torch.uint8) % 2 if dtype == torch.bool else bits.to(torch.uint8)
                    mine, got = bits.clone().view(dtype).view(shape), torch.zeros_like(bits).view(dtype).view(shape)
                except (RuntimeError, NotImplementedError, TypeError):
                    continue  # torch itself cannot view bytes as this dtype
                tried += 1
                receive = transport.irecv(got, other, tag)
                send = transport.isend(mine, other, tag)
                transport.wait(send, "1SEND_F0", other)
                transport.wait(receive, "1RECV_F0", other)
                assert receive.test() and send.test()
                assert torch.equal(got.reshape(-1).view(torch.uint8), bits), (dtype, shape)
        assert tried > 80, tried
        # quiet, signalling and negative NaNs
        nan = torch.tensor([0x7FC1, 0x7F81, -1, -63], dtype=torch.int16).view(torch.bfloat16)
        got = torch.zeros(4, dtype=torch.bfloat16)
        receive, send = transport.irecv(got, other, 0), transport.isend(nan, other, 0)
        transport.wait(receive), transport.wait(send)
        assert got.view(torch.int16).tolist() == [0x7FC1, 0x7F81, -1, -63]
        """,
        check=True,
    )


def test_what_cannot_be_sent_is_refused_before_anything_is_sent() -> None:
    run_mpi(
        2,
        """
        import pytest, torch
        from pipert.comm.errors import MessageError
        from pipert.comm.mpi import MpiTransport
        transport = MpiTransport.world(tag_bound=32767)
        good = torch.zeros(4)
        sparse = torch.eye(3).to_sparse()
        z = torch.ones(1, dtype=torch.complex64) * 1j
        cases = [
            (torch.zeros(4, 4).t(), 1, 0, "not contiguous"), (torch.zeros(4, 4)[:, 1], 1, 0, "not contiguous"),
            (torch.zeros(4).expand(3, 4), 1, 0, "not contiguous"),
            (torch.empty(3, device="meta"), 1, 0, "no dense memory"),
            (sparse, 1, 0, "no dense memory"), (z.conj(), 1, 0, "lazily"), (z.conj().imag, 1, 0, "lazily"),
            ([1.0], 1, 0, "torch.Tensor"), (None, 1, 0, "torch.Tensor"),
            (good, 2, 0, "not a rank of this group of 2"), (good, -1, 0, "not a rank"), (good, "1", 0, "not a rank"),
            (good, None, 0, "not a rank"), (good, 1, -1, "tag = -1 is out of bounds"), (good, 1, 32767, "tag < 32767"),
            (good, 1, 2**40, "out of bounds"), (good, 1, "0", "not a number"),
        ]
        for tensor, peer, tag, words in cases:
            for start in (transport.isend, transport.irecv):
                with pytest.raises(MessageError, match=words):
                    start(tensor, peer, tag)
        for start in (
            lambda: transport.iallreduce(torch.zeros(4, 4).t()), lambda: transport.iallreduce(good, "mean"),
            lambda: transport.iallreduce(torch.zeros(3, dtype=torch.bool)), lambda: transport.ibroadcast(good, 2),
            lambda: transport.ireduce_scatter(torch.zeros(3), good), lambda: transport.iallgather(good, good),
        ):
            with pytest.raises(MessageError):
                start()
        assert not transport.counters.messages, transport.counters
        """,
        check=True,
    )


def test_tags_reach_up_to_the_bound_and_keep_messages_apart() -> None:
    run_mpi(
        2,
        """
        import torch
        from pipert.comm.mpi import MpiTransport
        plain, bounded = MpiTransport.world(), MpiTransport.world(tag_bound=32768)
        assert plain.tag_bound > 32767 and bounded.tag_bound == 32768
        tags = [*range(0, 32768, 997), 32766, 32767]
        for transport in (plain, bounded):
            other = 1 - transport.rank
            got = [torch.zeros(3, dtype=torch.int64) for _ in tags]
            sends = [transport.isend(torch.full((3,), tag), other, tag) for tag in tags]
            receives = [transport.irecv(box, other, tag) for tag, box in reversed(list(zip(tags, got)))]
            for request in receives + sends:
                transport.wait(request)
            assert [int(box[0]) for box in got] == tags
            assert transport.counters.messages == {"send": len(tags), "receive": len(tags)}
            assert transport.counters.bytes["send"] == 24 * len(tags)
        """,
        check=True,
    )


def test_synchronous_sends_complete_only_when_their_receive_has_started() -> None:
    script = """
        import sys, time, torch
        from pipert.comm.mpi import MpiTransport
        transport = MpiTransport.world(synchronous=True if sys.argv[1] == "argument" else None)
        assert transport.synchronous
        if transport.rank == 0:
            send = transport.isend(torch.ones(1), 1, 0)
            until = time.monotonic() + 0.3
            while time.monotonic() < until:
                assert not send.test()
            transport.barrier()
            transport.wait(send)
        else:
            transport.barrier()
            got = torch.zeros(1)
            transport.wait(transport.irecv(got, 0, 0))
            assert got == 1
        # rounds of shape-changing messages both ways, all forced to be rendezvous
        for step in range(10):
            count = 1 + (step * 37) % 100
            got, mine = torch.zeros(count), torch.full((count,), float(step))
            receive = transport.irecv(got, 1 - transport.rank, step)
            send = transport.isend(mine, 1 - transport.rank, step)
            transport.wait(send), transport.wait(receive)
            assert (got == step).all()
        """
    run_mpi(2, script, ["argument"], check=True)
    run_mpi(2, script, ["environment"], env={"PIPERT_SYNCHRONOUS": "1"}, check=True)


def test_collectives_agree_with_local_arithmetic_on_real_ranks() -> None:
    run_mpi(
        3,
        """
        import torch
        from pipert.comm.mpi import MpiTransport
        from pipert.comm.reduction import reduce_in_order
        world = MpiTransport.world()
        group = world.split(0, -world.rank)  # reversed
        for transport in (world, group):
            rank, size = transport.rank, transport.size
            draw = lambda seed, count: torch.randn(
                count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
            )
            rows = lambda dtype, count: [(9 * draw(count + r, count)).to(dtype) for r in range(size)]
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32):
                for count in (0, 1, 5, 1000, 400_003):
                    everyone = rows(dtype, count)
                    sums, peaks = everyone[rank].clone(), everyone[rank].clone()
                    # two at once, waited for in the other order
                    first, second = transport.iallreduce(sums), transport.iallreduce(peaks, "max")
                    transport.wait(second, "peaks"), transport.wait(first, "sums")
                    assert torch.equal(sums, reduce_in_order(everyone, "sum")), (dtype, count)
                    assert torch.equal(peaks, reduce_in_order(everyone, "max"))
                    out = torch.empty((size, count), dtype=dtype)
                    transport.wait(transport.iallgather(out, everyone[rank]))
                    assert torch.equal(out, torch.stack(everyone))
                    if count % size == 0:
                        part = torch.empty(count // size, dtype=dtype)
                        transport.wait(transport.ireduce_scatter(part, everyone[rank].clone()))
                        assert torch.equal(part, reduce_in_order(everyone, "sum").view(size, -1)[rank])
                    copy = everyone[rank].clone()
                    transport.wait(transport.ibroadcast(copy, 1))
                    assert torch.equal(copy, everyone[1])
            blobs = transport.exchange(bytes([rank]) * (rank * 40_000))
            assert blobs == [bytes([r]) * (r * 40_000) for r in range(size)]
            transport.barrier()
        ones = torch.ones(7, dtype=torch.bfloat16)
        world.wait(world.iallreduce(ones))
        assert (ones == 3).all()
        """,
        check=True,
    )


def test_groups_and_a_second_world_keep_their_messages_apart() -> None:
    run_mpi(
        4,
        """
        import torch
        from pipert.comm.errors import OptionError
        from pipert.comm.mpi import MpiTransport
        from pipert.scheduler.semantics import Semantics
        world, second = MpiTransport.world(), MpiTransport.world()
        assert isinstance(Semantics(**world.semantics), Semantics)
        rank = world.rank
        pair, odd = world.split(rank // 2, rank), world.split(None if rank % 2 == 0 else 0, -rank)
        assert (pair.rank, pair.size) == (rank % 2, 2)
        assert odd is None if rank % 2 == 0 else (odd.rank, odd.size) == ((3 - rank) // 2, 2)
        boxes = [torch.zeros(1) for _ in range(3)]
        # the same peer, the same tag, three transports: started in different orders
        peer = rank ^ 1
        receives = [
            second.irecv(boxes[1], peer, 0), pair.irecv(boxes[2], peer % 2, 0), world.irecv(boxes[0], peer, 0)
        ]
        sends = [
            world.isend(torch.tensor([1.0]), peer, 0), second.isend(torch.tensor([2.0]), peer, 0),
            pair.isend(torch.tensor([3.0]), peer % 2, 0),
        ]
        for request in sends + receives:
            world.wait(request)  # a wait on one transport drives all
        assert [float(box) for box in boxes] == [1, 2, 3]
        # a collective of one transport goes on while the rank waits in another
        total = torch.full((100_000,), float(rank))
        running = second.iallreduce(total)
        world.barrier()
        pair.wait(running)
        assert (total == 6).all()
        try:
            world.split(-1, 0)
        except OptionError as error:
            assert "None to stay out" in str(error)
        else:
            raise AssertionError
        for transport in (pair, second):
            transport.close()
            transport.close()
        """,
        check=True,
    )


def test_a_message_longer_than_its_receive_is_an_error_of_the_receiver() -> None:
    result = run_mpi(
        2,
        """
        import torch
        from pipert.comm.mpi import MpiTransport
        transport = MpiTransport.world()
        if transport.rank == 0:
            transport.wait(transport.isend(torch.ones(100), 1, 0), "0SEND_F0", 1)
            transport.barrier()
        else:
            transport.wait(transport.irecv(torch.ones(10), 0, 0), "1RECV_F0", 0)
        """,
    )
    assert result.returncode != 0
    assert "TransportError: 1RECV_F0: MPI reports" in result.stderr, result.text


def test_one_rank_alone_needs_no_launcher() -> None:
    script = """
        import torch
        from pipert.comm.mpi import MpiTransport
        transport = MpiTransport.world()
        assert transport.size == 1 and transport.exchange(b"x") == [b"x"]
        got = torch.zeros(3)
        receive, send = transport.irecv(got, 0, 1), transport.isend(torch.ones(3), 0, 1)
        transport.wait(receive), transport.wait(send)
        assert (got == 1).all()
        for start in (transport.iallreduce, lambda t: transport.iallgather(t, torch.ones(3))):
            transport.wait(start(got))
        assert (got == 1).all()
        raise SystemExit(5)
        """
    assert run_mpi(1, script, launcher=[sys.executable]).returncode == 5


def test_the_wrong_launcher_is_refused_instead_of_running_many_jobs_of_one() -> None:
    # PMI_SIZE from the start would make MPICH look for its launcher, so it is set after MPI has started
    script = """
        import os
        from mpi4py import MPI
        os.environ["PMI_SIZE"] = "4"
        from pipert.comm.mpi import MpiTransport
        MpiTransport.world()
        """
    result = run_mpi(1, script, launcher=[sys.executable])
    assert result.returncode == 1
    assert "MPI sees a world of 1 but the launcher promised 4 ranks (PMI_SIZE=4)" in result.stderr, result.text
    assert "pipert launch" in result.stderr


@pytest.mark.slow
def test_sixteen_ranks_run_on_two_cores() -> None:
    result = run_mpi(
        16,
        """
        import time, torch
        from pipert.comm.mpi import MpiTransport
        transport = MpiTransport.world()
        rank, size = transport.rank, transport.size
        transport.barrier()
        begin = time.monotonic()
        box = torch.zeros(256)
        for lap in range(20):  # one token around the ring: 15 ranks wait while one works
            if rank == 0:
                transport.wait(transport.isend(box, 1, 0), "lap", 1)
                transport.wait(transport.irecv(box, size - 1, 0), "lap", size - 1)
            else:
                transport.wait(transport.irecv(box, rank - 1, 0), "lap", rank - 1)
                transport.wait(transport.isend(box, (rank + 1) % size, 0), "lap", (rank + 1) % size)
        hop = (time.monotonic() - begin) / (20 * size)
        total = torch.full((50_000,), float(rank))
        transport.wait(transport.iallreduce(total))
        assert (total == size * (size - 1) / 2).all()
        if rank == 0:
            print(f"{hop * 1e6:.0f} us a hop")
            assert hop < 5e-3, hop
        """,
        timeout=240,
        deadline=120,
        check=True,
    )
    assert "us a hop" in result.stdout


@pytest.mark.slow
def test_a_message_of_more_than_two_gibibytes_arrives_whole() -> None:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if free < 7 * 2**30:
        pytest.skip(f"needs 7 GiB of free memory, there are {free / 2**30:.1f}")
    run_mpi(
        2,
        """
        import torch
        from pipert.comm.mpi import MpiTransport
        transport = MpiTransport.world()
        count = 2**31 + 16
        tensor = torch.full((count,), 7 if transport.rank == 0 else 0, dtype=torch.uint8)
        if transport.rank == 0:
            tensor[2**31 - 1], tensor[2**31], tensor[-1] = 1, 2, 3
            transport.wait(transport.isend(tensor, 1, 0), "0SEND_F0", 1)
        else:
            transport.wait(transport.irecv(tensor, 0, 0), "1RECV_F0", 0)
            assert (tensor[2**31 - 1], tensor[2**31], tensor[-1]) == (1, 2, 3)
            tensor[2**31 - 1] = tensor[2**31] = tensor[-1] = 7
            assert (tensor.view(torch.int64) == 0x0707070707070707).all()
        """,
        timeout=200,
        deadline=150,
        check=True,
    )
