"""Ranks as threads of one process: for property tests, notebooks and proving that a program cannot hang."""

from __future__ import annotations

import contextvars
import ctypes
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar

from pipert.comm.errors import JobAborted, OptionError, TransportError
from pipert.comm.faults import Faults
from pipert.comm.local_fabric import Fabric, Killed
from pipert.comm.local_matching import Rules
from pipert.comm.local_operations import Group
from pipert.comm.local_transport import LocalTransport

_Result = TypeVar("_Result")

_CURRENT: contextvars.ContextVar[LocalTransport | None] = contextvars.ContextVar("pipert_local_transport", default=None)


def current_transport() -> LocalTransport | None:
    """The transport of the rank whose thread this is; None outside `run_ranks`."""
    return _CURRENT.get()


def run_ranks(
    size: int,
    fn: Callable[[LocalTransport], _Result],
    *,
    buffered: bool = False,
    blocking: bool = False,
    matching: Literal["tag", "order"] = "tag",
    channel: Literal["message", "pair", "direction", "rank"] = "message",
    grouped: bool = False,
    tag_bound: int = 32768,
    faults: Faults | None = None,
    deadline: float | None = 60.0,
    grace: float = 5.0,
    leftovers: Literal["refuse", "ignore"] = "refuse",
    return_exceptions: bool = False,
) -> list[_Result]:
    """Run ``fn(transport)`` on ``size`` ranks, each a thread, and give back what they return, in rank order.

    The words ``buffered``, ``blocking``, ``matching``, ``channel`` and ``grouped`` are those of
    `pipert.scheduler.semantics.Semantics`; the transports say them again in ``transport.semantics``.

    Args:
        size: the number of ranks.
        fn: what every rank does.
        buffered: sends are complete when they start (else when their receive has started).
        blocking: ``isend`` and ``irecv`` themselves wait.
        matching: messages are matched by tag, or by order alone, as NCCL does. By order, messages of equal size land in
            each other's place without an error.
        channel: which operations of a rank form one queue in which each starts when the one before it is complete.
        grouped: ``transport.group()`` collects what starts in it; that starts, and is complete, together.
        tag_bound: tags lie below it.
        faults: delays, lost messages and killed ranks.
        deadline: seconds that one wait may take. A deadlock is found at once all the same.
        grace: seconds that the ranks get to notice that the job has failed; then those that compute and never look are
            interrupted at their next line of Python.
        leftovers: whether operations that never met their other half are an error at the end.
        return_exceptions: give back the exceptions in the place of results instead of raising the first cause.

    Raises:
        OptionError: an option has a value it cannot have; before any rank starts.
        TransportError: all ranks have returned, but messages are left over.
        BaseException: what the first rank to fail raised. A note tells the rank.
    """
    if size < 1:
        raise OptionError(f"size = {size} is not a number of ranks; use 1 or more")
    rules = Rules(buffered, blocking, matching, channel, grouped, tag_bound)
    faults = faults or Faults()
    faults.check_ranks(size)
    fabric = Fabric(size, rules, faults, deadline)
    world = Group(("world",), tuple(range(size)))
    outcomes: list[Any] = [None] * size
    raised = [False] * size

    def body(rank: int) -> None:
        fabric.enter(rank)
        transport = LocalTransport(fabric, rules, world, rank)
        _CURRENT.set(transport)
        try:
            outcomes[rank] = fn(transport)
        except BaseException as error:
            failure = fabric.fail(error, rank)
            outcomes[rank] = failure.error if isinstance(error, Killed) else error
            raised[rank] = True
        finally:
            transport.close()
            fabric.leave(rank)

    _run_threads(fabric, [partial(body, rank) for rank in range(size)], grace)
    failure = fabric.failure
    if failure is None:
        if leftovers == "refuse" and (left := fabric.leftovers()):
            raise TransportError("the ranks ended with operations that never met their other half:\n" + "\n".join(left))
    elif any(raised) and not return_exceptions:
        failure.error.add_note("on all ranks" if failure.rank is None else f"on rank {failure.rank} of {size}")
        raise failure.error
    return outcomes


def _run_threads(fabric: Fabric, bodies: list[Callable[[], None]], grace: float) -> None:
    """Run each body in a thread that inherits the caller's context; leave no thread behind."""
    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(body,), name=f"pipert rank {rank}", daemon=True)
        for rank, body in enumerate(bodies)
    ]
    try:
        for thread in threads:
            thread.start()
        stuck = fabric.join(grace)
    except BaseException as error:  # the calling thread was interrupted, or there are no more threads to be had
        fabric.fail(error, None)
        stuck = fabric.join(grace)
        raise
    finally:
        for ident in stuck:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(JobAborted))
        for thread in threads:
            if thread.ident is not None:
                thread.join(1.0 if stuck else None)
