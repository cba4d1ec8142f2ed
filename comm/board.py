"""The status board: what every rank of one machine is doing, in a small file they all map into memory.

Writing to it is a few memory copies and works while MPI is stuck, while a rank is being killed, and from another
thread; reading it needs nobody's help. So it tells who owes a message and what that rank is doing when a wait passes
its deadline, carries the first cause of a failure to every rank of the machine, and is still there for a post-mortem.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from pipert.comm.doorbell import Doorbells
from pipert.comm.errors import TransportError

_MAGIC = b"pipertb1"
_HEAD = 4096
_SLOT = 512
_TEXT = 160
_CAUSE = struct.Struct("<iBd H")
_PEER = struct.Struct("<id")
_TIME = struct.Struct("<d")
_IDENTITY = struct.Struct("<ii")
# Offsets in the head: magic, number of slots, aborted, cause, a word that stays 0, text. In a slot: state, told,
# waiting, rank and pid, heartbeat, since when it does what it does, the peer it waits for and since when, the two
# texts, and the two words of its doorbell.
_COUNT, _ABORTED, _CAUSE_AT, _ZERO, _CAUSE_TEXT = 8, 16, 24, 60, 64
_STATE, _TOLD, _WAITING, _WHO, _BEAT, _SINCE, _OWES, _DOING, _WAITS = 0, 1, 2, 4, 16, 24, 32, 64, 64 + _TEXT
_BELL = _WAITS + _TEXT


class State(IntEnum):
    """Where a rank is in its life."""

    ABSENT = 0  #: has not joined yet
    RUNNING = 1
    LEFT = 2  #: its script has ended; it waits for the others to end too
    FINISHED = 3  #: everybody has ended
    FAILED = 4


class Kind(IntEnum):
    """What ended a job."""

    ERROR = 1  #: a rank raised an exception
    HANG = 2  #: a wait passed its deadline
    LEFT = 3  #: a rank ended its script while another waited for it
    DIED = 4  #: a rank's process is gone


@dataclass(frozen=True)
class Cause:
    """The first thing that went wrong in a job.

    Attributes:
        rank: the rank at fault or, for a hang, the one that noticed.
        kind: what happened.
        text: in words, one or more lines.
        when: seconds of ``time.time()``.
    """

    rank: int
    kind: Kind
    text: str
    when: float


@dataclass(frozen=True)
class Status:
    """What the board says of one rank. Times are seconds of ``time.monotonic()``.

    Attributes:
        rank: its rank in the world.
        pid: its process.
        state: where it is in its life.
        told: it has printed the first cause.
        doing: what it reported last, in schedule words.
        since: when it reported that.
        waits: what it waits in, None when it does not wait.
        peer: the world's rank that owes what it waits for, None if no one in particular.
        waits_since: when that wait began.
        beat: when its watchdog last ran; later only if its Python is stuck or stopped.
    """

    rank: int
    pid: int
    state: State
    told: bool
    doing: str
    since: float
    waits: str | None
    peer: int | None
    waits_since: float
    beat: float


class Board:
    """A mapped board. One process writes one slot; everybody reads all.

    Attributes:
        path: the file, which may be unlinked already.
    """

    def __init__(self, path: Path, descriptor: int, slot: int | None) -> None:
        """Map an open board file; ``slot`` is this process's own, None for a mere reader."""
        self.path = path
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        if self._memory[: len(_MAGIC)] != _MAGIC:
            raise TransportError(f"{path} is not a status board")
        self._slots = int.from_bytes(self._memory[_COUNT : _COUNT + 4], "little")
        self._base = _HEAD + _SLOT * (slot or 0)
        self._doing = self._base + _DOING
        self._since = self._base + _SINCE

    @classmethod
    def create(cls, path: Path, ranks: Sequence[int]) -> None:
        """Make the file for these ranks of the world (the ones of one machine)."""
        size = _HEAD + _SLOT * len(ranks)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(descriptor, size)
            for slot, rank in enumerate(ranks):
                os.pwrite(descriptor, _IDENTITY.pack(rank, 0), _HEAD + _SLOT * slot + _WHO)
            os.pwrite(descriptor, _MAGIC + len(ranks).to_bytes(4, "little"), 0)
        finally:
            os.close(descriptor)

    @classmethod
    def open(cls, path: Path, slot: int | None = None) -> Board:
        """Map an existing board.

        Raises:
            TransportError: the file is not there or is no board.
        """
        try:
            return cls(path, os.open(path, os.O_RDWR | os.O_CLOEXEC), slot)
        except (OSError, ValueError) as error:
            raise TransportError(f"the status board {path} cannot be opened: {error}") from error

    @property
    def aborted(self) -> bool:
        """Somebody has claimed the first cause."""
        return self._memory[_ABORTED] != 0

    def doorbells(self) -> Doorbells | None:
        """The doorbells of this machine's ranks; None where there are none."""
        if not Doorbells.supported():
            return None
        bases = [_HEAD + _SLOT * slot for slot in range(self._slots)]
        ranks = [_IDENTITY.unpack_from(self._memory, base + _WHO)[0] for base in bases]
        own = _IDENTITY.unpack_from(self._memory, self._base + _WHO)[0]
        places = {rank: base + _BELL for rank, base in zip(ranks, bases, strict=True)}
        return Doorbells(self._descriptor, places, own, _ZERO)

    # ---- what this rank writes --------------------------------------------------------------------------------------

    def join(self) -> None:
        """Enter this process: from now on its slot says it runs."""
        memory, base = self._memory, self._base
        rank, _ = _IDENTITY.unpack_from(memory, base + _WHO)
        _IDENTITY.pack_into(memory, base + _WHO, rank, os.getpid())
        self.report("starting")
        self.beat()
        self.state(State.RUNNING)

    def state(self, state: State) -> None:
        """Note where this rank is in its life."""
        self._memory[self._base + _STATE] = state

    def tell(self) -> None:
        """Note that this rank has printed the first cause."""
        self._memory[self._base + _TOLD] = 1

    def beat(self) -> None:
        """Note that this rank's watchdog runs."""
        _TIME.pack_into(self._memory, self._base + _BEAT, time.monotonic())

    def report(self, doing: object) -> None:
        """Note what this rank does now. Called before every action: about half a microsecond."""
        text = str(doing).encode()[: _TEXT - 1] + b"\0"
        begin = self._doing
        self._memory[begin : begin + len(text)] = text
        _TIME.pack_into(self._memory, self._since, time.monotonic())

    def wait_in(self, doing: str, peer: int | None, since: float) -> None:
        """Note that this rank waits, and for whom (a rank of the world)."""
        memory, base = self._memory, self._base
        text = doing.encode()[: _TEXT - 1] + b"\0"
        memory[base + _WAITS : base + _WAITS + len(text)] = text
        _PEER.pack_into(memory, base + _OWES, -1 if peer is None else peer, since)
        memory[base + _WAITING] = 1

    def wait_over(self) -> None:
        """Note that this rank waits no more."""
        self._memory[self._base + _WAITING] = 0

    def claim(self, cause: Cause) -> bool:
        """Enter the first cause of the failure, once.

        Returns:
            False when another cause was first; nothing is changed then.
        """
        text = cause.text.encode()[: _HEAD - _CAUSE_TEXT]
        with self._lock:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
            try:
                if self.aborted:
                    return False
                memory = self._memory
                _CAUSE.pack_into(memory, _CAUSE_AT, cause.rank, cause.kind, cause.when, len(text))
                memory[_CAUSE_TEXT : _CAUSE_TEXT + len(text)] = text
                memory[_ABORTED] = 1
                return True
            finally:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    # ---- what anybody reads -----------------------------------------------------------------------------------------

    def cause(self) -> Cause | None:
        """The first cause, None while all is well."""
        if not self.aborted:
            return None
        rank, kind, when, length = _CAUSE.unpack_from(self._memory, _CAUSE_AT)
        text = self._memory[_CAUSE_TEXT : _CAUSE_TEXT + length].decode(errors="replace")
        return Cause(rank, Kind(kind), text, when)

    def statuses(self) -> tuple[Status, ...]:
        """What every rank of this machine is doing, in slot order (by rank)."""
        return tuple(self._status(_HEAD + _SLOT * slot) for slot in range(self._slots))

    def _status(self, base: int) -> Status:
        memory = self._memory
        rank, pid = _IDENTITY.unpack_from(memory, base + _WHO)
        peer, waits_since = _PEER.unpack_from(memory, base + _OWES)
        return Status(
            rank=rank,
            pid=pid,
            state=State(memory[base + _STATE]),
            told=memory[base + _TOLD] != 0,
            doing=self._text(base + _DOING),
            since=_TIME.unpack_from(memory, base + _SINCE)[0],
            waits=self._text(base + _WAITS) if memory[base + _WAITING] else None,
            peer=None if peer < 0 else peer,
            waits_since=waits_since,
            beat=_TIME.unpack_from(memory, base + _BEAT)[0],
        )

    def _text(self, begin: int) -> str:
        return self._memory[begin : begin + _TEXT].split(b"\0", 1)[0].decode(errors="replace")

    def close(self) -> None:
        """Unmap. The file stays, if it has a name still."""
        with self._lock:
            if not self._memory.closed:
                self._memory.close()
                os.close(self._descriptor)


def mpi_segments(pid: int) -> list[Path]:
    """The shared-memory files that MPICH made for a process; it removes them in ``MPI_Finalize`` only."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return []
    return sorted({Path(name) for line in lines if (name := line.split()[-1]).startswith("/dev/shm/mpich_shm_")})
