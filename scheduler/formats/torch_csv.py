"""The schedule CSV of torch.distributed.pipelining: one row a rank, one cell an action, blank cells for idle steps.

::

    cell    = "" | action | "(" action { ";" action } ")OVERLAP_F_B"
    action  = stage kind [ micro-batch ]            2F0  1I2  3W1  0B0  2SEND_F0  1RECV_B3  0UNSHARD  0REDUCE_GRAD

The kinds F, I, W, B, SEND_F, RECV_F, SEND_B and RECV_B mean what they mean here. The parts of an overlapped action
become actions one behind the other. Older versions of torch write BW for the whole backward and B for its input half: a
file with a BW is read so, with a notice. UNSHARD, RESHARD and REDUCE_GRAD belong to sharded data parallelism, which is
no part of a schedule: they are left out, with a notice.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator

import numpy as np

from pipert.scheduler.action import Action, Kind
from pipert.scheduler.errors import ActionError, FormatError
from pipert.scheduler.formats.imported import Imported, assembled, notice
from pipert.scheduler.formats.rows import packed
from pipert.scheduler.program import Program
from pipert.scheduler.row import ActionRow
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.semantics import NCCL_PAIR, Semantics

#: Torch's actions around sharded data parallelism.
SHARDING = ("UNSHARD", "RESHARD", "REDUCE_GRAD")

_SHARDING = re.compile(rf"\d+({'|'.join(SHARDING)})(\d*)", re.ASCII)
#: How older versions of torch spell B and I, in the order in which they are to be replaced.
_OLDER = ((re.compile(r"(\d+)B(\d+)", re.ASCII), r"\1I\2"), (re.compile(r"(\d+)BW(\d+)", re.ASCII), r"\1B\2"))
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_KIND = re.compile(r"\d+([A-Z_]+)\d*", re.ASCII)
_KINDS = (*(kind for kind in Kind if kind.is_scheduled), Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)


def loads(text: str, *, name: str = "torch", semantics: Semantics = NCCL_PAIR) -> Imported:
    """Read a schedule (compute only) or a program (with communication).

    Args:
        text: the file's content.
        name: what to call it; the file has no name.
        semantics: the transport that a program is for; torch's on NCCL posts every message on its own.

    Raises:
        FormatError: a cell is no action, or stages are missing.
    """
    left_out: Counter[str] = Counter()
    older = _OLDER[1][0].search(text)
    for spelling, now in _OLDER if older else ():
        text = spelling.sub(now, text)
    rows = [_row(cells, line, left_out) for line, cells in enumerate(_cells(text), 1)]
    notices = notice(left_out, "sharding is no part of a schedule")
    if older:
        notices += ("there is a BW, so this is read as older torch's: BW is the whole backward, B its input half",)
    return Imported(assembled(name, rows, semantics), notices)


def dumps(value: Schedule | Program) -> str:
    """Write a schedule as torch's ``compute_only`` CSV, a program as ``compute_comms``.

    Raises:
        FormatError: the program has groups, sizes, reductions or ties, which torch's format cannot spell.
    """
    if isinstance(value, Program) and value.groups:
        raise FormatError("torch's CSV has no groups; lower the schedule for a transport without them")
    for rank, row in enumerate(value.rows):
        foreign = np.flatnonzero(~np.isin(row.kinds, _KINDS))
        if len(foreign):
            kind = row[int(foreign[0])].kind.name
            raise FormatError(f"rank {rank}: torch's CSV has no {kind}; lower without sizes, reduce and ties")
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(row.words() for row in value.rows)
    return out.getvalue()


def _cells(text: str) -> list[list[str]]:
    """The rows of the file, without empty lines at its end."""
    try:
        return list(csv.reader(io.StringIO(text.rstrip(), newline="")))
    except csv.Error as error:
        raise FormatError(f"this is no CSV ({error}); write a row of actions for each rank") from error


def _row(cells: list[str], line: int, left_out: Counter[str]) -> ActionRow:
    """The actions of one row."""
    words = [(word, place) for place, cell in enumerate(cells) for word in _words(cell.strip(), left_out)]
    row = packed([word for word, _ in words])
    if row is not None and np.isin(row.kinds, _KINDS).all():
        return row
    return ActionRow(_action(word, line, place) for word, place in words)  # which says what is wrong


def _words(cell: str, left_out: Counter[str]) -> Iterator[str]:
    """The actions of one cell, as they are spelled."""
    overlapped = _OVERLAP.fullmatch(cell) if cell.startswith("(") else None
    for word in map(str.strip, overlapped[1].split(";")) if overlapped else (cell,):
        sharding = _SHARDING.fullmatch(word) if "R" in word else None
        if sharding:
            left_out[sharding[1]] += 1
        elif word:
            yield word


def _action(word: str, line: int, place: int) -> Action:
    kind, known = _KIND.fullmatch(word), [kind.name for kind in _KINDS]
    if kind and kind[1] not in known:
        raise FormatError(f"row {line}, cell {place}: torch has no kind {kind[1]}; the kinds are {', '.join(known)}")
    try:
        return Action.parse(word)
    except ActionError as error:
        raise FormatError(f"row {line}, cell {place}: {error}") from error
