"""Live activations: which actions begin and end the life of a micro-batch's activations on a rank. Written once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pipert.scheduler.action import KIND_MASK, KIND_SHIFT, STAGE_SHIFT, Kind
from pipert.scheduler.row import Codes

#: What each kind adds to the number of live micro-batches: the forward begins, the last backward part ends. While its
#: activations are in host memory a micro-batch is not live.
CHANGES: dict[Kind, int] = {Kind.F: +1, Kind.B: -1, Kind.W: -1, Kind.OFFLOAD: -1, Kind.RELOAD: +1}

#: The kinds that end it for good.
ENDS = (Kind.B, Kind.W)

_TABLE = np.zeros(KIND_MASK + 1, dtype=np.int8)
_TABLE[list(CHANGES)] = list(CHANGES.values())


def live_changes(codes: Codes, trainable_from: int = 0) -> npt.NDArray[np.int8]:
    """What each action adds to the number of live (stage, micro-batch) pairs of its rank: +1, 0 or −1.

    A stage without a backward (below `trainable_from`) keeps nothing.
    """
    changes: npt.NDArray[np.int8] = _TABLE[codes >> KIND_SHIFT & KIND_MASK]
    if trainable_from > 0:
        changes[codes >> STAGE_SHIFT < trainable_from] = 0
    return changes
