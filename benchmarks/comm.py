"""Messages and sums over the MPI transport against raw mpi4py and gloo, on 2 ranks with one thread each.

All contestants move the same torch tensors in one job and take turns; figures are medians over the rounds.

* Latency and bandwidth, 8 B to 64 MB: a message there and one back, divided by two. Raw mpi4py is ``Isend`` and
  ``Irecv`` of the tensor's memory, and ``Wait``. To hold: pipert takes at most 1.3 times as long as raw mpi4py.
* All-reduce in fp32 and bf16, 1 to 64 MB. To hold: pipert at least as fast as gloo. MPI's own all-reduce stands beside
  it in fp32 (MPICH 5's fails on bf16 in place).

The last line is one JSON object with figures, bars and whether they hold; the exit code says the same.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from _verdicts import conclude, verdicts

#: Bytes of a message: round trips a turn, and turns for one of the longest. A turn lasts some milliseconds, and as long
#: again before it counts: after gloo, whose waits sleep, the kernel may have put both ranks on one core for a while.
MESSAGES = {
    8: (2000, 3),
    1024: (2000, 3),
    8192: (1000, 3),
    65536: (300, 3),
    2**20: (20, 3),
    2**24: (2, 2),
    2**26: (1, 1),
}
#: Megabytes of an all-reduce: how many a turn, and turns for one of the longest.
SUMS = {1: (1, 8), 4: (1, 4), 16: (1, 2), 64: (1, 1)}

#: What a figure's name ends in, whether it is a floor or a ceiling, and the bar.
BARS = (("time over raw mpi4py", "at most", 1.3), ("speed over gloo", "at least", 1.0))


def size_name(nbytes: int) -> str:
    """``64 KB``."""
    for unit, factor in (("MB", 2**20), ("KB", 2**10)):
        if nbytes >= factor:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def take_turns(
    barrier: Callable[[], None], contestants: Mapping[str, Callable[[], object]], rounds: int, times: int
) -> dict[str, float]:
    """The median seconds of one call of every contestant, the first round left out."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(rounds + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            call = contestants[name]
            barrier()
            for _ in range(times):
                call()
            start = time.perf_counter()
            for _ in range(times):
                call()
            if number:
                seconds[name].append((time.perf_counter() - start) / times)
    return {name: median(values) for name, values in seconds.items()}


def round_trips(transport: Any, mpi: Any, gloo: Any, nbytes: int) -> dict[str, Callable[[], None]]:
    """A message there and back, by each contestant."""
    import torch

    out, back = torch.ones(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
    comm, byte, memory = mpi.COMM_WORLD.Dup(), mpi.BYTE, mpi.buffer.fromaddress
    first, other = transport.rank == 0, 1 - transport.rank

    def pipert_send() -> None:
        transport.wait(transport.isend(out, other, 0), "SEND", other)

    def pipert_receive() -> None:
        transport.wait(transport.irecv(back, other, 0), "RECV", other)

    def raw_send() -> None:
        comm.Isend([memory(out.data_ptr(), out.nbytes), byte], other, 0).Wait()

    def raw_receive() -> None:
        comm.Irecv([memory(back.data_ptr(), back.nbytes), byte], other, 0).Wait()

    def both(send: Callable[[], Any], receive: Callable[[], Any]) -> Callable[[], None]:
        steps = (send, receive) if first else (receive, send)

        def trip() -> None:
            steps[0]()
            steps[1]()

        return trip

    return {
        "pipert": both(pipert_send, pipert_receive),
        "raw mpi4py": both(raw_send, raw_receive),
        "gloo": both(lambda: gloo.send(out, other), lambda: gloo.recv(back, other)),
    }


def sums(transport: Any, mpi: Any, gloo: Any, megabytes: int, name: str) -> dict[str, Callable[[], object]]:
    """An all-reduce, by each contestant."""
    import torch

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[name]
    tensor = torch.zeros(megabytes * 2**20 // dtype.itemsize, dtype=dtype)
    comm, memory = mpi.COMM_WORLD.Dup(), mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
    contestants: dict[str, Callable[[], object]] = {
        "pipert": lambda: transport.wait(transport.iallreduce(tensor), "REDUCE"),
        "gloo": lambda: gloo.all_reduce(tensor),
    }
    if name == "fp32":
        contestants["MPI_Allreduce"] = lambda: comm.Allreduce(mpi.IN_PLACE, [memory, mpi.FLOAT])
    return contestants


def worker(rounds: int, folder: Path) -> None:
    """What each rank does."""
    import torch
    import torch.distributed as gloo

    from pipert.comm.mpi import MpiTransport

    torch.set_num_threads(1)
    transport = MpiTransport.world(deadline=120.0)
    from mpi4py import MPI

    gloo.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=transport.rank, world_size=transport.size)
    figures: dict[str, float] = {}
    for nbytes, (times, more) in MESSAGES.items():
        taken = take_turns(MPI.COMM_WORLD.Barrier, round_trips(transport, MPI, gloo, nbytes), rounds * more, times)
        figures |= message_figures(size_name(nbytes), nbytes, taken)
    for name in ("fp32", "bf16"):
        for megabytes, (times, more) in SUMS.items():
            taken = take_turns(
                MPI.COMM_WORLD.Barrier, sums(transport, MPI, gloo, megabytes, name), rounds * more, times
            )
            label = f"all-reduce {name} {megabytes} MB"
            figures |= {f"{label}, {who}, ms": seconds * 1e3 for who, seconds in taken.items()}
            figures[f"{label}, pipert's speed over gloo"] = taken["gloo"] / taken["pipert"]
    gloo.destroy_process_group()
    if transport.rank == 0:
        folder.joinpath("figures").write_text(json.dumps(figures))


def message_figures(name: str, nbytes: int, taken: Mapping[str, float]) -> dict[str, float]:
    """Microseconds and GB/s one way."""
    figures = {f"message {name}, {who}, us": seconds / 2 * 1e6 for who, seconds in taken.items()}
    if nbytes >= 2**20:
        figures[f"message {name}, pipert, GB/s"] = nbytes / (taken["pipert"] / 2) / 1e9
    figures[f"message {name}, pipert's time over raw mpi4py"] = taken["pipert"] / taken["raw mpi4py"]
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each contestant, in the longest parts")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder:
        worker(arguments.rounds, arguments.folder)
        return 0
    from pipert.launch import launch

    with tempfile.TemporaryDirectory() as name:
        command = [__file__, "--rounds", str(arguments.rounds), "--folder", name]
        code = launch(2, command, env={"OMP_NUM_THREADS": "1"})
        if code:
            return code
        figures: dict[str, float] = json.loads(Path(name, "figures").read_text())
    for figure, value in figures.items():
        print(f"{figure:60} {value:10.4g}")
    print(f"load average before and after: {os.getloadavg()[2]:.1f}, {os.getloadavg()[0]:.1f}")
    return conclude("comm", figures, verdicts(figures, BARS))


if __name__ == "__main__":
    sys.exit(main())
