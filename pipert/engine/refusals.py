"""Refusals: typed errors that every rank raises together, because one of them found a reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

from pipert import errors as runtime_errors
from pipert.comm.transport import Transport
from pipert.errors import PipertError
from pipert.scheduler import errors as scheduler_errors
from pipert.scheduler.errors import ScheduleError

_Result = TypeVar("_Result")

#: What counts as a refusal. Any other exception is a failure, which ends the job.
REFUSALS = (PipertError, ScheduleError)
Refusal = PipertError | ScheduleError


def encode(error: Refusal) -> tuple[str, str]:
    """Class and message, as they travel."""
    return type(error).__name__, str(error)


def decode(refusal: tuple[str, str], rank: int, ranks: int) -> Refusal:
    """The error that another rank found; it says which, unless there is only one."""
    name, message = refusal
    kinds: dict[str, type[Refusal]] = {**vars(scheduler_errors), **vars(runtime_errors)}
    return kinds.get(name, PipertError)(message if ranks == 1 else f"rank {rank}: {message}")


def together(transport: Transport, work: Callable[[], _Result]) -> _Result:
    """Do some work on every rank; if it is refused on any, raise that refusal on all.

    Raises:
        PipertError, ScheduleError: the refusal of the first rank that has one.
        BaseException: any other exception of this rank, after the job has been aborted.
    """
    refusal: tuple[str, str] | None = None
    result: list[_Result] = []
    try:
        result.append(work())
    except REFUSALS as error:
        refusal = encode(error)
    except BaseException as error:
        transport.abort(error)
        raise
    for rank, blob in enumerate(transport.exchange(json.dumps(refusal).encode())):
        found = json.loads(blob)
        if found is not None:
            raise decode(found, rank, transport.size)
    return result[0]
