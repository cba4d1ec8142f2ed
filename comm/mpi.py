"""Transport over MPI (mpi4py): messages straight from the tensors' memory, matched by tag.

Nothing relies on eager sends, and nothing blocks inside MPI: all waits go through `pipert.comm.wait`. Each transport
has two communicators of its own, for messages and for collectives, made when it is made; so pipert's messages never
meet those of the host program or of another transport.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from pipert.comm import collectives
from pipert.comm.buffers import check_parts, check_peer
from pipert.comm.counters import Counters
from pipert.comm.doorbell import Nap, PlainNap
from pipert.comm.errors import OptionError, TransportError
from pipert.comm.mpi_job import Job, job, seconds_from_environment
from pipert.comm.mpi_messages import Limits, Messages, check_memory, starter
from pipert.comm.reduction import check_reduction
from pipert.comm.transport import Request, Transport
from pipert.comm.wait import Collective, Steps, wait_until

#: Seconds of waiting after which the board says that this rank waits.
_NOTED = 0.005


class MpiTransport(Transport):
    """Ranks are the processes of an MPI job. Made by `world` and `split`; used from one thread.

    A step needs as many buffers as it has messages under way: MPI reads and writes the tensors themselves.
    """

    def __init__(self, job: Job, comm: Any, deadline: float, synchronous: bool, tag_bound: int) -> None:
        """Wrap a communicator that belongs to this transport alone. Collective over it.

        Args:
            job: the process's job.
            comm: an mpi4py communicator.
            deadline: seconds that a wait may last.
            synchronous: sends complete only when their receive has started (``MPI_Issend``), also short ones.
            tag_bound: tags stay below it; lowered to what MPI allows.
        """
        mpi = job.mpi
        self._job, self._comm, self._collective_comm = job, comm, comm.Dup()
        for each in (self._comm, self._collective_comm):
            each.Set_errhandler(mpi.ERRORS_RETURN)
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        highest: int = mpi.COMM_WORLD.Get_attr(mpi.TAG_UB)
        self.tag_bound = min(tag_bound, highest + 1)
        self.deadline = deadline
        self.synchronous = synchronous
        group, everybody = comm.Get_group(), mpi.COMM_WORLD.Get_group()
        self._world_ranks: list[int] = list(group.Translate_ranks(list(range(self.size)), everybody))
        self.semantics: Mapping[str, object] = MappingProxyType({"name": "mpi", "matching": "tag"})
        limits = Limits(self.size, self.tag_bound, self._world_ranks)
        self._nap: Nap = job.bells or PlainNap()
        self._isend, self._sends = starter(mpi, comm.Issend if synchronous else comm.Isend, limits, "dest", job.bells)
        self._irecv, self._receives = starter(mpi, comm.Irecv, limits, "source", job.bells)
        # Called without the methods around them, which cost some per cent of a short message.
        self.isend, self.irecv = self._isend, self._irecv  # type: ignore[method-assign, assignment]
        self._error: type[Exception] = mpi.Exception
        self._channel = Messages(mpi, self._collective_comm, limits._replace(tag_bound=highest + 1), job.bells)
        self._sequence = 0
        # A wait costs an object only after the policy's first polls.
        self._first_polls, self._policy = range(job.policy.spins), replace(job.policy, spins=0)
        self._collectives = Counters()
        self._closed = False

    @classmethod
    def world(
        cls, deadline: float | None = None, *, synchronous: bool | None = None, tag_bound: int | None = None
    ) -> MpiTransport:
        """All ranks of the job. Starts MPI if nobody has. Collective over the world.

        Args:
            deadline: seconds that a wait, or starting, may last; ``PIPERT_DEADLINE``, else 300, where None.
            synchronous: see `__init__`; ``PIPERT_SYNCHRONOUS=1`` where None.
            tag_bound: pretend that tags end here, as they do at 32767 in the smallest MPI.

        Raises:
            TransportError: no MPI, or a world of another size than the launcher promised.
            OptionError: an option that cannot be.
        """
        seconds = seconds_from_environment("PIPERT_DEADLINE", 300.0) if deadline is None else deadline
        if not seconds > 0:
            raise OptionError(f"deadline = {deadline} is not a time; give a positive number of seconds")
        if synchronous is None:
            synchronous = os.environ.get("PIPERT_SYNCHRONOUS", "0") not in ("", "0")
        shared = job(seconds)
        with shared.watchdog.guard("making the communicators of the world", seconds):
            comm = shared.mpi.COMM_WORLD.Dup()
            return cls(shared, comm, seconds, synchronous, tag_bound or 2**62)

    # ---- messages ---------------------------------------------------------------------------------------------------

    def isend(self, tensor: torch.Tensor, dest: int, tag: int) -> Request:
        """See `Transport.isend`.

        Raises:
            MessageError: before anything is sent; a tensor that is not dense memory on the CPU, a wrong rank or tag.
        """
        return self._isend(tensor, dest, tag)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int) -> Request:
        """See `Transport.irecv`.

        Raises:
            MessageError: as `isend`.
        """
        return self._irecv(tensor, source, tag)

    # ---- collectives ------------------------------------------------------------------------------------------------

    def iallreduce(self, tensor: torch.Tensor, op: str = "sum") -> Request:
        """See `Transport.iallreduce`; sums as specified in `pipert.comm.collectives`."""
        check_reduction(tensor.dtype, op)
        self._check(tensor)
        return self._start("allreduce", tensor, collectives.all_reduce(self._channel, tensor, op, self._tag()))

    def ireduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor) -> Request:
        """See `Transport.ireduce_scatter`."""
        check_parts(tensor, out, self.size, "reduce-scatter")
        self._check(out, tensor)
        steps = collectives.reduce_scatter(self._channel, out, tensor, self._tag())
        return self._start("reduce_scatter", tensor, steps)

    def iallgather(self, out: torch.Tensor, tensor: torch.Tensor) -> Request:
        """See `Transport.iallgather`."""
        check_parts(out, tensor, self.size, "all-gather")
        self._check(out, tensor)
        return self._start("allgather", out, collectives.all_gather(self._channel, out, tensor, self._tag()))

    def ibroadcast(self, tensor: torch.Tensor, root: int) -> Request:
        """See `Transport.ibroadcast`."""
        root = check_peer(root, self.size, "root")
        self._check(tensor)
        return self._start("broadcast", tensor, collectives.broadcast(self._channel, tensor, root, self._tag()))

    def exchange(self, blob: bytes) -> list[bytes]:
        """See `Transport.exchange`."""
        result: list[bytes] = []

        def steps() -> Steps:
            result.extend((yield from collectives.exchange(self._channel, blob, self._tag())))

        self._collectives.record("exchange", len(blob))
        self.wait(self._job.progress.start(steps()), "an exchange")
        return result

    def _check(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            check_memory(tensor)

    def _tag(self) -> int:
        self._sequence = (self._sequence + 1) % (min(self.tag_bound, 1 << 20) // collectives.TAGS)
        return self._sequence * collectives.TAGS

    def _start(self, kind: str, tensor: torch.Tensor, steps: Steps) -> Collective:
        self._collectives.record(kind, tensor.nbytes)
        return self._job.progress.start(steps)

    # ---- waiting ----------------------------------------------------------------------------------------------------

    def wait(self, request: Request, doing: object = "", peer: int | None = None) -> None:
        """See `Transport.wait`.

        Raises:
            HangError: the deadline passed, or the rank that owes the message has left.
            JobAborted: another rank failed first.
            TransportError: MPI says that the operation failed.
        """
        test = request.test
        try:
            if test():
                return
            for _ in self._first_polls:
                if test():
                    return
            wait = _Wait(self, request, doing, peer)
            wait_until(wait.done, self._policy, wait.check, self._nap)
            wait.over()  # not after an error: then the board goes on telling what this rank waited for
        except self._error as error:
            raise TransportError(f"{doing or 'a message'}: MPI reports {str(error).splitlines()[0]}") from error

    def progress(self) -> None:
        """See `Transport.progress`."""
        self._job.progress.poll()
        self._comm.Iprobe(self._job.mpi.ANY_SOURCE, 0)
        self._job.look()

    def report(self, doing: object) -> None:
        """See `Transport.report`."""
        self._job.board.report(doing)

    @property
    def counters(self) -> Counters:
        """What this rank has started so far, by kind: ``send``, ``receive`` and the collectives."""
        counts = Counters(self._collectives.messages.copy(), self._collectives.bytes.copy())
        for kind, count in (("send", self._sends()), ("receive", self._receives())):
            if count.messages:
                counts.messages[kind], counts.bytes[kind] = count
        return counts

    # ---- groups and the end -----------------------------------------------------------------------------------------

    def split(self, color: int | None, key: int) -> MpiTransport | None:
        """See `Transport.split`."""
        mpi = self._job.mpi
        if color is not None and color < 0:
            raise OptionError(f"color = {color} is not a group's number; use one >= 0, or None to stay out")
        with self._job.watchdog.guard("making the communicators of a group", self.deadline):
            comm = self._comm.Split(mpi.UNDEFINED if color is None else color, key)
            if comm == mpi.COMM_NULL:
                return None
            return MpiTransport(self._job, comm, self.deadline, self.synchronous, self.tag_bound)

    def abort(self, error: BaseException) -> None:
        """See `Transport.abort`."""
        self._job.fail(error)

    def close(self) -> None:
        """Free the communicators. Collective where MPI makes it so: every rank closes, in the same order."""
        if not self._closed and not self._job.mpi.Is_finalized() and not self._job.board.aborted:
            with self._job.watchdog.guard("freeing communicators", self.deadline):
                self._comm.Free()
                self._collective_comm.Free()
        self._closed = True


class _Wait:
    """One wait that did not end at once."""

    def __init__(self, transport: MpiTransport, request: Request, doing: object, peer: int | None) -> None:
        self._transport, self._request, self._doing, self._peer = transport, request, doing, peer
        self._job = transport._job
        self._noted: int | None = -1

    def done(self) -> bool:
        """Drive everything this rank has under way."""
        if self._request.test():
            return True
        self._job.progress.poll()
        return False

    def check(self, waited: float) -> None:
        """End the wait early when the job has failed, the deadline has passed, or the peer has left."""
        self._job.look()
        if waited < _NOTED:
            return
        owing: int | None = getattr(self._request, "peer", None)
        if owing is None and self._peer is not None:
            owing = self._transport._world_ranks[self._peer]
        if owing != self._noted:
            self._noted = owing
            self._job.board.wait_in(str(self._doing), owing, time.monotonic() - waited)
        if waited > self._transport.deadline:
            raise self._job.hang(str(self._doing), owing, waited, self._transport.deadline)
        if owing is not None:
            self._job.check_present(owing, str(self._doing), waited)

    def over(self) -> None:
        """Note on the board that the wait has ended, if it was noted."""
        if self._noted != -1:
            self._job.board.wait_over()
