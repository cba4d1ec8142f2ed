"""What a transport guarantees about messages, as a value that lowering and the verifier use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from pipert.scheduler.errors import SemanticsError

Matching = Literal["tag", "order"]
Channel = Literal["message", "pair", "direction", "rank"]


@dataclass(frozen=True)
class Semantics:
    """The message rules of a transport.

    A rank goes through its program in order. Reaching a SEND or RECV *posts* it. Operations that share a channel form a
    queue: each starts only when the one before it is complete. A RECV completes when its SEND has started; a SEND
    completes at once where sends are buffered, else when its RECV has started (rendezvous). A compute action waits for
    the RECV that feeds it, a RECV_F for the RECV_META that tells its size (the rank stands still until it is there).
    Where operations are blocking, the rank itself also waits in each one until it is complete.

    A group is one launch: all its operations start together, once the last is posted and everything queued before any
    of them is complete, and they are complete together, once each of them could be by itself. So what waits for one of
    them, or is queued behind one, waits for all. Where operations are blocking, the rank waits at the group's end.
    (NCCL and RCCL do the operations of a group on one communicator in one kernel. A group over several communicators
    is a kernel for each, which may be complete one before the other, or launched as one. Nothing here promises that
    they are not one. Since every event waits for *all* of a fixed set, what gets to its end by these rules does so
    too where less is waited for.)

    Collectives share no queue with messages. A TIE completes when every rank of the tie has posted it (a rank with
    several copies adds them itself and takes part with its last TIE), a NORM when every rank has; a REDUCE, SCATTER or
    GATHER is among replicas that run the same program, so it completes by itself. The sums of one stage (REDUCE,
    SCATTER, TIE) follow one another: each holds the rank until the one before it is complete. A computation holds the
    rank until the GATHER before it is complete, a STEP until the last of the sums that it uses is, or the NORM. The
    step ends when every operation is complete.

    The collectives of a spread vocabulary (`VOCABULARY_COLLECTIVES`) are among all ranks, matched by order, and share
    one queue: each starts when every rank has posted it and the one before it is complete.

    Attributes:
        name: what error messages call it.
        buffered: a send completes without its receiver.
        blocking: SEND and RECV hold the rank until they are complete.
        matching: a receive gets the message with its ``tag``, or the next one in ``order`` from that peer.
        channel: what shares a queue: nothing (each ``message`` on its own), each ``pair`` of ranks, each ``direction``
            of a pair, or all messages of a ``rank``.
        grouped: adjacent messages may be issued as one group.

    Raises:
        SemanticsError: a value that is none of these.
    """

    name: str
    buffered: bool = False
    blocking: bool = False
    matching: Matching = "tag"
    channel: Channel = "message"
    grouped: bool = False

    def __post_init__(self) -> None:
        for name, known in (("matching", get_args(Matching)), ("channel", get_args(Channel))):
            if getattr(self, name) not in known:
                raise SemanticsError(f"{name} = {getattr(self, name)!r} is no rule; choose one of {', '.join(known)}")
        for name in ("buffered", "blocking", "grouped"):
            if not isinstance(getattr(self, name), bool):
                raise SemanticsError(f"{name} = {getattr(self, name)!r} is neither True nor False")

    def describe(self) -> str:
        """The rules in a few words, without the name."""
        sends = f"{'blocking ' if self.blocking else ''}{'buffered' if self.buffered else 'rendezvous'} sends"
        queue = "no queues" if self.channel == "message" else f"one queue per {self.channel}"
        return f"{sends}, matched by {self.matching}, {queue}{', groups' if self.grouped else ''}"


#: Non-blocking MPI: tags, no queues, and no reliance on eager sends (they stop at a few KiB).
MPI = Semantics("mpi")
#: Blocking MPI sends that never buffer (MPI_Ssend): the strictest use of MPI.
MPI_SYNCHRONOUS = Semantics("mpi-synchronous", blocking=True)
#: Blocking MPI sends into buffers (MPI_Bsend).
MPI_BUFFERED = Semantics("mpi-buffered", buffered=True, blocking=True)
#: NCCL and RCCL: matched by order, never buffered; one communicator and stream per pair of ranks.
NCCL_PAIR = Semantics("nccl-pair", matching="order", channel="pair")
#: One communicator per direction of each pair.
NCCL_DIRECTION = Semantics("nccl-direction", matching="order", channel="direction")
#: One communicator for all peers of a rank.
NCCL_RANK = Semantics("nccl-rank", matching="order", channel="rank")
#: One communicator per pair, adjacent messages issued between ncclGroupStart and ncclGroupEnd.
NCCL_GROUPED = Semantics("nccl-grouped", matching="order", channel="pair", grouped=True)
#: gloo: buffered in practice for small messages only, so treated as rendezvous; matched by tag.
GLOO = Semantics("gloo")

NAMED: dict[str, Semantics] = {
    value.name: value
    for value in (MPI, MPI_SYNCHRONOUS, MPI_BUFFERED, NCCL_PAIR, NCCL_DIRECTION, NCCL_RANK, NCCL_GROUPED, GLOO)
}
