"""Which ranks share a machine, and the status board they share."""

from __future__ import annotations

import os
import socket
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipert.comm.board import Board
from pipert.comm.errors import TransportError


@dataclass(frozen=True)
class Node:
    """The ranks of the world that share this process's machine, and the others.

    Attributes:
        board: the machine's board.
        ranks: this machine's ranks of the world, ascending.
        elsewhere: every other machine's, in a fixed order.
    """

    board: Board
    ranks: tuple[int, ...]
    elsewhere: tuple[tuple[int, ...], ...]


def node_key() -> str:
    """What two ranks have in common exactly if they share processes and memory; ``PIPERT_NODE`` splits a machine."""
    try:
        processes = os.readlink("/proc/self/ns/pid")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        processes = boot = ""
    return "\n".join((socket.gethostname(), boot, processes, os.environ.get("PIPERT_NODE", "")))


def board_folder() -> tuple[Path, bool]:
    """Where boards lie, and whether they stay: `pipert launch` names a folder and reads it after the job."""
    given = os.environ.get("PIPERT_BOARD_DIR", "")
    if given and os.access(given, os.W_OK):
        return Path(given), True
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir()), False


def join_board(mpi: Any, comm: Any) -> Node:
    """Make or open this machine's board and enter this process. Collective over ``comm``, which is the world.

    The file has no name any more when this returns (a job that is killed leaves nothing behind), unless a launcher
    wants to read it.
    """
    rank = comm.Get_rank()
    keys = comm.allgather(node_key())
    local = comm.Split(keys.index(keys[rank]), rank)
    board = _open(local, rank)
    if not local.allreduce(board is not None, mpi.LAND):  # no common folder after all: a board of one's own
        keys[rank] += f"\n{rank}"
        local.Free()
        local = comm.Split(rank, 0)
        board = _open(local, rank)
    keys = comm.allgather(keys[rank])
    if board is None:
        folder = board_folder()[0]
        raise TransportError(f"rank {rank} cannot write a status board in {folder}; set TMPDIR to one it can")
    board.join()
    local.Barrier()
    if local.Get_rank() == 0 and not board_folder()[1]:
        board.path.unlink(missing_ok=True)
    local.Free()
    machines: dict[str, list[int]] = {}
    for other, key in enumerate(keys):
        machines.setdefault(key, []).append(other)
    own = tuple(machines.pop(keys[rank]))
    return Node(board, own, tuple(map(tuple, machines.values())))


def _open(local: Any, rank: int) -> Board | None:
    """Local rank 0 makes the file, all open it; None where that is not possible."""
    ranks = local.allgather(rank)
    path: Path | None = None
    if local.Get_rank() == 0:
        path = board_folder()[0] / f"pipert-{uuid.uuid4().hex}.board"
        try:
            Board.create(path, ranks)
        except OSError:
            path = None
    path = local.bcast(path, 0)
    try:
        return None if path is None else Board.open(path, local.Get_rank())
    except TransportError:
        return None
