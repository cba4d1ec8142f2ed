"""What `pipert doctor` runs on two ranks: a message, a sum and a measurement. ``python -m pipert.comm.selftest``."""

from __future__ import annotations

import sys
import time

import torch

from pipert.comm.mpi import MpiTransport


def main() -> None:
    """Pass messages among all ranks and print one line on rank 0; fails if a number is wrong."""
    transport = MpiTransport.world()
    rank, size = transport.rank, transport.size
    right, left = (rank + 1) % size, (rank - 1) % size
    sent, received = torch.full((8,), float(rank), dtype=torch.bfloat16), torch.empty(8, dtype=torch.bfloat16)
    times = []
    for _ in range(200):
        begin = time.perf_counter()
        arriving, leaving = transport.irecv(received, left, 0), transport.isend(sent, right, 0)
        transport.wait(arriving, "a test message", left)
        transport.wait(leaving, "a test message", right)
        times.append(time.perf_counter() - begin)
    total = torch.full((1 << 18,), rank + 1.0)
    transport.wait(transport.iallreduce(total), "a test sum")
    right_numbers = bool((received == left).all()) and bool((total == size * (size + 1) / 2).all())
    if rank == 0:
        sys.stdout.write(f"{size} ranks, {sorted(times)[len(times) // 2] * 1e6:.1f} us a message each way\n")
    if not right_numbers:
        raise SystemExit(f"rank {rank} received wrong numbers")


if __name__ == "__main__":
    main()
