"""What ranks say when a job ends badly, as text made from what the status board holds."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType

from pipert.comm.board import Cause, Kind, State, Status

#: A rank whose watchdog has not run for this many seconds is stuck with Python's lock held, or stopped.
_STUCK = 3.0
#: Between a torch module and its ``forward``.
_MODULE_CALLS = ("_wrapped_call_impl", "_call_impl")


def exception_text(error: BaseException) -> str:
    """Name an exception with its notes, where it was raised and what caused it, innermost frame first."""
    lines = [_one_line(error), *(f"  {note}" for note in getattr(error, "__notes__", ()))]
    frames = traceback.extract_tb(error.__traceback__)
    if frames:
        lines.append(f"  at {_frames(frames)}")
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        lines.append(f"  because of {_one_line(cause)}")
    return "\n".join(lines)


def stack_text(where: FrameType | TracebackType) -> str:
    """Where a thread stands, or stood when it raised, innermost frame first."""
    if isinstance(where, FrameType):
        return _frames(traceback.extract_stack(where))
    return _frames(traceback.extract_tb(where))


def describe(status: Status, now: float) -> str:
    """Say in one line what a rank is doing at ``now`` (seconds of ``time.monotonic()``)."""
    who, doing = f"rank {status.rank}", status.doing or "its start"
    if status.state is State.ABSENT:
        return f"{who} has not started"
    if status.state in (State.LEFT, State.FINISHED):
        return f"{who} has left: its script has ended"
    if status.state is State.FAILED:
        return f"{who} has failed, last in {doing}"
    if status.waits is not None:
        return f"{who} waits {_seconds(now - status.waits_since)} {in_from(status.waits, status.peer)}"
    text = f"{who} is in {doing} for {_seconds(now - status.since)}"
    silent = now - status.beat
    return text if silent < _STUCK else f"{text}, and its Python has not run for {_seconds(silent)} (stuck or stopped)"


def in_from(doing: str, peer: int | None) -> str:
    """``in 1RECV_F3 from rank 0``, as far as it is known."""
    return f"in {doing or 'a wait'}" + ("" if peer is None else f" from rank {peer}")


def chain(statuses: Sequence[Status], rank: int, now: float) -> str:
    """Follow who waits for whom from ``rank`` to the one that holds everybody up: a line for each."""
    known: Mapping[int, Status] = {status.rank: status for status in statuses}
    lines: list[str] = []
    seen: list[int] = []
    at: int | None = rank
    while at is not None:
        if at in seen:
            circle = seen[seen.index(at) :]
            lines.append(f"a circle: none of the ranks {', '.join(map(str, sorted(circle)))} can go on")
            break
        if at not in known:
            lines.append(f"rank {at} is on another machine and reports there")
            break
        seen.append(at)
        status = known[at]
        lines.append(describe(status, now))
        at = status.peer if status.waits is not None and status.state is State.RUNNING else None
    return "\n".join(f"{'  ' * depth}{line}" for depth, line in enumerate(lines))


def first_words(cause: Cause) -> str:
    """The first cause as a sentence, and what belongs to it in more lines."""
    return f"rank {cause.rank} failed first: {cause.text}" if cause.kind is Kind.ERROR else cause.text


def farewell(cause: Cause, statuses: Sequence[Status], rank: int, now: float, stack: str = "") -> str:
    """What one rank prints when the job ends: the first cause, then what it was doing itself and who held it up.

    Args:
        cause: the first cause.
        statuses: what the board says.
        rank: the rank that prints.
        now: seconds of ``time.monotonic()``.
        stack: where its main thread stands, if that is worth a line.
    """
    first, *rest = first_words(cause).splitlines()
    lines = [f"rank {rank} stops: {first}", *(f"  {line}" for line in rest)]
    if rank != cause.rank:
        lines += [f"  {line}" for line in chain(statuses, rank, now).splitlines()]
    if stack:
        lines.append(f"  its main thread is at {stack}")
    return "\n".join(f"pipert: {line}" for line in lines)


def post_mortem(cause: Cause | None, statuses: Sequence[Status], now: float) -> str:
    """What an onlooker reads from a board after the job: the first cause, if noted, and each rank's last words."""
    lines = []
    if cause is not None:
        first, *rest = first_words(cause).splitlines()
        lines += [f"first cause: {first}", *(f"  {line}" for line in rest)]
    lines += [f"  {describe(status, now)}" for status in statuses]
    return "\n".join(lines)


def _one_line(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(type(error), error)).splitlines()[0]


def _frames(frames: Sequence[traceback.FrameSummary], most: int = 4) -> str:
    """The innermost frames, without those that are the same for everybody: this package's innermost, modules' calls."""
    here = Path(__file__).parent
    inner = [frame for frame in reversed(frames) if frame.name not in _MODULE_CALLS] or list(reversed(frames))
    while len(inner) > 1 and Path(inner[0].filename).parent == here:
        del inner[0]
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in inner[:most])


def _seconds(value: float) -> str:
    return f"{max(0.0, value):.1f} s"
