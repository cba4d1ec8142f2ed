"""Tensor parallelism, ZeRO and a pipeline against torch's DTensor, DDP and FSDP2 on gloo.

Two parts, each a job of two MPI ranks, one thread each, in which the contestants take turns step by step; figures are
medians of rounds.

* ``tp``: a GPT whose layers both ranks share, against torch's tensor parallelism.
* ``dp``: two replicas with ZeRO 1, 2 and 3, and two pipeline stages, against DDP and FSDP2 on the same global batch.

Memory is the most that a step's tensors take at once. Bytes moved are counted by the transport.

The last line is one JSON object with figures, bars and whether they hold; the exit code says the same.
"""

from __future__ import annotations

import sys

from _jobs import run_jobs

#: Part, ranks, rounds.
JOBS = (("tp", 2, 15), ("dp", 2, 9))

#: What a figure's name ends in, whether it is a floor or a ceiling, and the bar.
BARS = (
    ("speed against torch", "at least", 1.0),
    ("memory against torch", "at most", 1.001),
    ("bytes moved over the formula's", "at least", 0.99),
    ("bytes moved over the formula's", "at most", 1.01),
)


if __name__ == "__main__":
    sys.exit(run_jobs(__file__, __doc__, JOBS, BARS))
