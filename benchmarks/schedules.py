"""Schedules against each other, against their simulation, and against torch.distributed.pipelining on gloo.

Two parts, each a job of MPI ranks in which the contestants take turns step by step; figures are medians.

* ``sleep``: blocks that sleep, the last one twice as long, on 8 ranks: 1F1B, interleaved, ZB-H1, ZB-V and a searched
  schedule. The makespan against what the simulator says for what the blocks take by themselves, and whether the
  schedules come in the predicted order.
* ``gpt``: a GPT on 2 ranks, one thread each. By how much zero-bubble schedules beat 1F1B, against what the simulator
  says for the stages' times in the same steps; and the best of pipert's against the best of torch's.

The last line is one JSON object with figures, bars and whether they hold; the exit code says the same.
"""

from __future__ import annotations

import sys

from _jobs import run_jobs

#: Part, ranks, rounds.
JOBS = (("sleep", 8, 3), ("gpt", 2, 20))

#: What a figure's name ends in, whether it is a floor or a ceiling, and the bar.
BARS = (
    ("makespan over simulated", "at most", 1.03),
    ("pairs of schedules in another order than predicted", "at most", 0),
    ("gain over 1F1B, distance from the predicted one", "at most", 0.03),
    ("speed of pipert's best over torch's best", "at least", 1.08),
)


if __name__ == "__main__":
    sys.exit(run_jobs(__file__, __doc__, JOBS, BARS))
