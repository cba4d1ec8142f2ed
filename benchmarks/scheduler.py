"""The scheduler: how fast it proves and simulates 64 ranks x 1,024 micro-batches x 8 chunks, and how soon it starts.

* ``simulate``, ``verify``: seconds, of the interleaved schedule with 1.05 million computations, and of its programs for
  several transports, 3.1 million actions each with their messages (median of 5, the kernels compiled before). ``1f1b``
  has as many computations, on 64 ranks with 8,192 micro-batches; ``recurrence`` counts every step of its recurrence,
  with a hundred times as many micro-batches, ``jump`` those that repeat as if they had been made.
* ``lower``: seconds for the programs of the interleaved schedule.
* ``start``: seconds of the command ``pipert schedule check 1f1b``, from nothing to its answer (median of 5), with the
  byte code of all modules kept, as an installed package has it.

All are processor seconds of one thread, so that other work on the machine does not count. The last line is one JSON
object with figures, bars and whether they hold; the exit code says the same. With ``--large`` also 1,024 ranks x 8,192
micro-batches (16.8 million computations, 50 million actions with messages), which takes a minute and 4 GiB.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from tempfile import TemporaryDirectory

from _verdicts import conclude, named

from pipert.scheduler.costs import Costs
from pipert.scheduler.generators.interleaved import interleaved
from pipert.scheduler.generators.one_f_one_b import one_f_one_b
from pipert.scheduler.lower import lower
from pipert.scheduler.recurrence import simulate_1f1b
from pipert.scheduler.semantics import MPI, MPI_SYNCHRONOUS, NCCL_GROUPED, NCCL_PAIR
from pipert.scheduler.simulate import simulate
from pipert.scheduler.verify import verify

RANKS, MICROBATCHES, CHUNKS = 64, 1024, 8
COSTS = Costs(1.0, 2.0, comm=0.01)

#: What has to hold.
BARS: dict[str, tuple[str, float]] = {
    "simulate interleaved, s": ("at most", 0.3),
    "simulate interleaved, M actions/s": ("at least", 10.0),
    "simulate 1f1b, M actions/s": ("at least", 10.0),
    "recurrence of 1f1b, M actions/s": ("at least", 300.0),
    "verify program for mpi, s": ("at most", 10.0),
    "verify program for mpi-synchronous, s": ("at most", 10.0),
    "verify program for nccl-pair, s": ("at most", 10.0),
    "verify program for nccl-grouped, s": ("at most", 10.0),
    "start, s": ("at most", 0.5),
}


def seconds(call: Callable[[], object], times: int = 5) -> float:
    """Processor time, so that other work on the machine does not count."""
    call()
    taken = []
    for _ in range(times):
        start = time.process_time()
        call()
        taken.append(time.process_time() - start)
    return median(taken)


def speeds() -> dict[str, float]:
    figures = {}
    made = interleaved(RANKS, MICROBATCHES, CHUNKS)
    for name, schedule in (("interleaved", made), ("1f1b", one_f_one_b(RANKS, MICROBATCHES * CHUNKS))):
        took = seconds(lambda schedule=schedule: simulate(schedule, COSTS))
        figures[f"simulate {name}, s"] = took
        figures[f"simulate {name}, M actions/s"] = schedule.num_actions / took / 1e6
        figures[f"verify schedule {name}, s"] = seconds(lambda schedule=schedule: verify(schedule).require())
    many = 100 * MICROBATCHES * CHUNKS
    for name, jump in (("recurrence of 1f1b", False), ("recurrence of 1f1b with jump", True)):
        took = seconds(lambda jump=jump: simulate_1f1b(RANKS, many, COSTS, jump=jump))
        figures[f"{name}, M actions/s"] = 2 * RANKS * many / took / 1e6
    for semantics in (MPI, MPI_SYNCHRONOUS, NCCL_PAIR, NCCL_GROUPED):
        begin = time.process_time()
        program = lower(made, semantics)
        figures[f"lower for {semantics.name}, s"] = time.process_time() - begin
        took = seconds(lambda program=program: verify(program).require())
        figures[f"verify program for {semantics.name}, s"] = took
        figures[f"verify program for {semantics.name}, M actions/s"] = sum(map(len, program.rows)) / took / 1e6
    program = lower(made, MPI)
    figures["simulate program for mpi, s"] = seconds(lambda: simulate(program, COSTS))
    return figures


def start() -> float:
    command = [sys.executable, "-m", "pipert", "schedule", "check", "1f1b"]

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    taken = []
    with TemporaryDirectory() as kept:
        here = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        for _ in range(6):
            before = used()
            subprocess.run(command, check=True, capture_output=True, env=here | {"PYTHONPYCACHEPREFIX": kept})
            taken.append(used() - before)
    return median(taken[1:])


def large() -> dict[str, float]:
    program = lower(one_f_one_b(1024, 8192), MPI)
    begin = time.process_time()
    verify(program).require()
    took = time.process_time() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"verify 1,024 x 8,192, s": took, "verify 1,024 x 8,192, peak GiB": peak}


def main() -> int:
    figures = speeds() | {"start, s": start()}
    if "--large" in sys.argv[1:]:
        figures |= large()
    return conclude("scheduler", figures, named(figures, BARS, "{:48} {:9.3f}"))


if __name__ == "__main__":
    sys.exit(main())
