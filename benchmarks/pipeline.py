"""The pipeline against one process, against torch.distributed.pipelining on gloo, and against its own simulation.

Three parts, each a job of MPI ranks in which the contestants take turns step by step; figures are medians.

* ``gpt``: a GPT on 2 ranks, one thread each. Against one process with two threads, against torch with the same
  schedule, and against what the simulator says for the block times measured in the same run.
* ``sleep``: stages that sleep, on 8 and 16 ranks, so that the makespan shows the runtime and not the cores. Against
  what the simulator says for what the stages take by themselves; torch's steps beside it.
* ``cost``: stages that do next to nothing and messages of 1 KiB: what an action costs in the runtime itself.

The last line is one JSON object with figures, bars and whether they hold; the exit code says the same.
"""

from __future__ import annotations

import sys

from _jobs import run_jobs

#: Part, ranks, rounds.
JOBS = (("gpt", 2, 9), ("sleep", 8, 3), ("sleep", 16, 3), ("cost", 2, 31))

#: What a figure's name ends in, whether it is a floor or a ceiling, and the bar.
BARS = (
    ("predicted against measured step", "at least", 0.97),
    ("speed against torch", "at least", 1.0),
    ("makespan over simulated", "at most", 1.03),
    ("pipert's own, us an action", "at most", 100.0),
)


if __name__ == "__main__":
    sys.exit(run_jobs(__file__, __doc__, JOBS, BARS))
