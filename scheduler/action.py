"""Actions: the words in which schedules, programs, traces and error messages speak.

An action is ``(stage, kind, micro-batch)``. Its text form puts the three together, ``2F0`` is the forward of stage 2 on
micro-batch 0, and is the same in code, file, trace, picture and log. Kinds without a micro-batch (``2REDUCE``,
``2STEP``) omit it; other kinds may have another number in its place (of a tied weight in ``2TIE0``).
"""

from __future__ import annotations

import re
from enum import IntEnum
from operator import index
from typing import NamedTuple

from pipert.scheduler.errors import ActionError

STAGE_SHIFT = 36
KIND_SHIFT = 28
MICROBATCH_MASK = (1 << KIND_SHIFT) - 1
KIND_MASK = (1 << (STAGE_SHIFT - KIND_SHIFT)) - 1
MAX_STAGES = 1 << 26


class Kind(IntEnum):
    """What an action does. The numbers are part of the packed form, never of a file."""

    F = 0  #: forward
    B = 1  #: whole backward: input gradient and weight gradient
    I = 2  # noqa: E741  #: input-gradient half of the backward
    W = 3  #: weight-gradient half of the backward
    SEND_F = 4  #: send the stage's output to the next stage
    RECV_F = 5  #: receive the stage's input from the previous stage
    SEND_B = 6  #: send the stage's input gradient to the previous stage
    RECV_B = 7  #: receive the stage's output gradient from the next stage
    SEND_META = 8  #: send the sizes of a forward message
    RECV_META = 9  #: receive the sizes of a forward message
    REDUCE = 10  #: sum the stage's gradients over its data-parallel replicas, those of tied weights apart
    TIE = 11  #: sum a tied weight's gradients over all copies and replicas (the number is the tie's)
    # A spread vocabulary (docs/vocabulary.md): every rank does each of these, at its first stage.
    S = 12  #: logits of the rank's shard of the head, their largest and sum of exponentials, its input gradient
    T = 13  #: weight gradient of the rank's shard of the head
    G = 14  #: weight gradient of the rank's shard of the embedding
    CAST_H = 15  #: the last stage's output goes to every rank
    STATS = 16  #: every rank gets every shard's statistics of the softmax
    SUM_H = 17  #: the sum of all shards' input gradients goes to the last stage
    SUM_E = 18  #: each rank looks up what its shard of the embedding has; the sum goes to the first stage
    CAST_E = 19  #: the gradient of the first stage's input goes to every rank
    # ZeRO and updates (docs/zero.md).
    SCATTER = 20  #: sum a micro-batch's gradients of the stage over its replicas; each keeps its shard of the sum
    GATHER = 21  #: fetch the other replicas' shards of the stage's weights (numbered within the stage)
    FREE = 22  #: let go of what the GATHER of the same number has fetched
    NORM = 23  #: find the norm of all gradients of the model, over all ranks, and decide on the update
    STEP = 24  #: update the stage's weights, or this replica's shard of them
    UNDO = 25  #: put the stage's weights back to what they were before its STEP
    # Activations in host memory (docs/precision.md).
    OFFLOAD = 26  #: move what the forward keeps for its backward to host memory
    RELOAD = 27  #: bring it back

    @property
    def is_compute(self) -> bool:
        """Whether the action computes."""
        return self.is_scheduled or self in VOCABULARY_WORK

    @property
    def is_scheduled(self) -> bool:
        """Whether the action computes for a stage, and so may appear in a `Schedule`."""
        return self <= Kind.W

    @property
    def is_message(self) -> bool:
        """Whether the action is one end of a point-to-point message."""
        return Kind.SEND_F <= self <= Kind.RECV_META

    @property
    def is_send(self) -> bool:
        """Whether the action is the sending end of a message."""
        return self in (Kind.SEND_F, Kind.SEND_B, Kind.SEND_META)

    @property
    def has_microbatch(self) -> bool:
        """Whether the text form carries a number behind the kind."""
        return self not in NUMBERLESS


#: Kinds that a rank does at most once a step for each stage, and so have no number.
NUMBERLESS = frozenset((Kind.REDUCE, Kind.NORM, Kind.STEP, Kind.UNDO))

#: What a spread vocabulary adds to the computations of a rank,
VOCABULARY_WORK = (Kind.S, Kind.T, Kind.G)
#: and the collectives of all ranks between them.
VOCABULARY_COLLECTIVES = (Kind.CAST_H, Kind.STATS, Kind.SUM_H, Kind.SUM_E, Kind.CAST_E)

#: The other end of each message: kind there, and that end's stage minus this end's.
COUNTERPART: dict[Kind, tuple[Kind, int]] = {
    Kind.SEND_F: (Kind.RECV_F, +1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, +1),
    Kind.SEND_META: (Kind.RECV_META, +1),
    Kind.RECV_META: (Kind.SEND_META, -1),
}

_TEXT = re.compile(r"(\d{1,12})([A-Z](?:[A-Z_]*[A-Z])?)(\d{1,12})?", re.ASCII)


class Action(NamedTuple):
    """One thing a rank does: ``kind`` for ``microbatch`` at ``stage``; all numbers start at 0."""

    stage: int
    kind: Kind
    microbatch: int = 0

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.name}{self.microbatch if self.kind.has_microbatch else ''}"

    @property
    def counterpart(self) -> Action:
        """The action at the other end of this message."""
        kind, offset = COUNTERPART[self.kind]
        return Action(self.stage + offset, kind, self.microbatch)

    @property
    def code(self) -> int:
        """The action packed into one integer: ``stage << 36 | kind << 28 | microbatch``.

        Raises:
            ActionError: a number does not fit into its bits, and so would make another action of this one.
        """
        try:
            stage, kind, microbatch = index(self.stage), Kind(self.kind), index(self.microbatch)
        except (TypeError, ValueError) as error:
            raise ActionError(
                f"{tuple(self)} is not (stage, Kind, micro-batch) with whole numbers ({error})"
            ) from error
        if abs(stage) >= MAX_STAGES or not 0 <= microbatch <= MICROBATCH_MASK:
            raise ActionError(
                f"stage {stage}, micro-batch {microbatch} of {kind.name} is out of range: stages < {MAX_STAGES}, "
                f"micro-batches 0 to {MICROBATCH_MASK}"
            )
        return stage << STAGE_SHIFT | kind << KIND_SHIFT | microbatch

    @classmethod
    def from_code(cls, code: int) -> Action:
        """Unpack `code`."""
        return cls(code >> STAGE_SHIFT, Kind(code >> KIND_SHIFT & KIND_MASK), code & MICROBATCH_MASK)

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the text form.

        Raises:
            ActionError: the text is not exactly one action.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ActionError(f"{text[:40]!r} is not an action; write stage, kind, micro-batch, as in 2F0 or 1SEND_B3")
        stage, name, microbatch = match.groups()
        if name not in Kind.__members__:
            known = ", ".join(Kind.__members__)
            raise ActionError(f"{text!r} has the unknown kind {name!r}; the kinds are {known}")
        kind = Kind[name]
        if kind.has_microbatch != (microbatch is not None):
            rule = "needs a micro-batch" if kind.has_microbatch else "takes no micro-batch"
            raise ActionError(f"{text!r}: {name} {rule}, for example {cls(0, kind)}")
        action = cls(int(stage), kind, int(microbatch or 0))
        if action.stage >= MAX_STAGES or action.microbatch > MICROBATCH_MASK:
            raise ActionError(f"{text!r} is out of range: stages < {MAX_STAGES}, micro-batches <= {MICROBATCH_MASK}")
        return action
