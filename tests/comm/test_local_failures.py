"""How a local job ends: exceptions, aborts, interrupts, leftovers, options."""

from __future__ import annotations

import pytest
import torch

from pipert.comm.errors import JobAborted, OptionError, TransportError
from pipert.comm.faults import Faults
from pipert.comm.local import current_transport, run_ranks
from pipert.comm.local_transport import LocalTransport

pytestmark = pytest.mark.usefixtures("no_thread_is_left_behind")


@pytest.mark.parametrize(
    "error", [ValueError("boom"), SystemExit(3), KeyboardInterrupt()], ids=lambda e: type(e).__name__
)
def test_the_first_exception_is_the_one_raised_and_the_others_are_told(error: BaseException) -> None:
    told: list[BaseException] = []

    def fn(transport: LocalTransport) -> None:
        if transport.rank == 2:
            raise error
        try:
            transport.barrier()
        except JobAborted as aborted:
            told.append(aborted)
            raise

    with pytest.raises(type(error)) as caught:
        run_ranks(5, fn)
    assert caught.value is error
    assert caught.value.__notes__[-1] == "on rank 2 of 5"
    assert len(told) == 4
    assert all(f"rank 2 failed first: {type(error).__name__}" in str(aborted) for aborted in told)
    assert all(aborted.__cause__ is error for aborted in told)


def test_an_abort_reaches_ranks_that_only_poll() -> None:
    def fn(transport: LocalTransport) -> None:
        if transport.rank == 0:
            transport.abort(RuntimeError("the loss is NaN"))
            return
        request = transport.irecv(torch.zeros(1), 0, 0) if transport.rank == 1 else None
        while True:
            transport.progress() if request is None else request.test()

    outcomes = run_ranks(3, fn, return_exceptions=True)
    assert outcomes[0] is None
    assert all("rank 0 failed first: RuntimeError: the loss is NaN" in str(outcome) for outcome in outcomes[1:])


def test_messages_left_over_at_the_end_are_refused() -> None:
    def fn(transport: LocalTransport) -> None:
        if transport.rank == 0:
            transport.isend(torch.zeros(1), 1, 4)

    for buffered in (False, True):
        with pytest.raises(TransportError, match="rank 0: send to rank 1, tag 4"):
            run_ranks(2, fn, buffered=buffered)
        run_ranks(2, fn, buffered=buffered, leftovers="ignore")


def test_an_interrupt_of_the_calling_thread_ends_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipert.comm.local_fabric import Fabric

    real, interrupts = Fabric.join, [KeyboardInterrupt()]

    def interrupted(self: Fabric, grace: float) -> list[int]:
        if interrupts:
            raise interrupts.pop()
        return real(self, grace)

    monkeypatch.setattr(Fabric, "join", interrupted)
    ended: list[BaseException] = []

    def fn(transport: LocalTransport) -> None:
        try:
            while True:
                transport.progress()
        except BaseException as error:
            ended.append(error)
            raise

    with pytest.raises(KeyboardInterrupt):
        run_ranks(3, fn)
    assert len(ended) == 3


def test_options_that_cannot_be_are_refused_before_any_rank_starts() -> None:
    started: list[int] = []

    def refuse(complaint: str, **options: object) -> None:
        with pytest.raises(OptionError, match=complaint):
            run_ranks(options.pop("size", 2), lambda t: started.append(t.rank), **options)  # type: ignore

    refuse("size = 0", size=0)
    refuse("matching = 'name' is unknown; use one of tag, order", matching="name")
    refuse("channel = 'stream' is unknown", channel="stream")
    refuse("tag_bound = 0", tag_bound=0)
    refuse("names rank 5, but there are 2 ranks", faults=Faults(kill=((5, 0),)))
    for wrong in ({"delay": -1.0}, {"drop_rate": 1.5}, {"reorder": True}, {"clock": "wall"}, {"kill": ((1,),)}):
        with pytest.raises(OptionError, match=next(iter(wrong))):
            Faults(**wrong)  # type: ignore[arg-type]
    assert started == []


def test_a_closed_transport_refuses_operations() -> None:
    def fn(transport: LocalTransport) -> None:
        transport.close()
        transport.close()
        with pytest.raises(TransportError, match="closed"):
            transport.isend(torch.zeros(1), 0, 0)

    run_ranks(1, fn)


def test_the_current_transport_is_the_threads_own() -> None:
    assert current_transport() is None
    assert all(run_ranks(3, lambda transport: current_transport() is transport))
    nested = run_ranks(2, lambda outer: run_ranks(3, lambda inner: current_transport() is inner and inner.size == 3))
    assert nested == [[True] * 3] * 2
