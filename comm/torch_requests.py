"""Requests of torch.distributed: how to learn that they are complete without blocking for it."""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist


class Done:
    """A request that was complete when it was started."""

    def test(self) -> bool:
        """True."""
        return True


@dataclass(eq=False)
class TorchRequest(ABC):
    """An operation under way.

    Attributes:
        work: torch's handle; None when complete.
        holds: what must stay alive until then: whatever has the tensors.
        finish: called once, in the thread that tests or waits, when the operation is complete.
        explain: makes the error to raise from the backend's.
    """

    work: dist.Work | None
    holds: Any
    finish: Callable[[], object] | None
    explain: Callable[[Exception], Exception]

    def test(self) -> bool:
        """Tell whether the operation is complete; does not block. Errors as in `wait`."""
        return self.wait(0.0)

    def wait(self, seconds: float) -> bool:
        """Wait until the operation is complete, but no longer than that. Returns whether it is.

        Raises:
            JobAborted, TransportError: the backend reports an error.
        """
        if self.work is None:
            return True
        try:
            if not self._arrives(self.work, seconds):
                return False
        except RuntimeError as error:
            raise self.explain(error) from error
        if self.finish is not None:
            self.finish()
        self.work = self.holds = self.finish = None
        return True

    @abstractmethod
    def _arrives(self, work: dist.Work, seconds: float) -> bool:
        """Whether it is complete within that time; raises the backend's error."""


class Waiters:
    """Threads that sleep in blocking calls for others: as many as calls were ever blocked at once. They stay."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0

    def run(self, call: Callable[[], None]) -> None:
        """Have a thread make the call now."""
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                threading.Thread(target=self._serve, name="pipert torch waiter", daemon=True).start()
        self._calls.put(call)

    def _serve(self) -> None:
        while True:
            self._calls.get()()
            with self._lock:
                self._idle += 1


class BackgroundRequest(TorchRequest):
    """A gloo operation. gloo's messages tell of their completion only to a thread that waits for them; so one does.

    It starts with the first `test` or `wait`.
    """

    def __init__(self, waiters: Waiters, *args: Any) -> None:
        """Take a thread from ``waiters`` when the time comes; other arguments as for `TorchRequest`."""
        super().__init__(*args)
        self._waiters = waiters
        self._over: threading.Event | None = None
        self._error: Exception | None = None

    def _arrives(self, work: dist.Work, seconds: float) -> bool:
        if self._over is None:
            self._over = threading.Event()
            self._waiters.run(lambda: self._sleep(work))
        if not self._over.wait(seconds):
            return False
        if self._error is not None:
            raise self._error
        return True

    def _sleep(self, work: dist.Work) -> None:
        try:
            work.wait()
        except Exception as error:
            self._error = error
        if self._over is not None:
            self._over.set()


class StreamRequest(TorchRequest):
    """An nccl operation: complete when the stream that it runs on has got so far."""

    def _arrives(self, work: dist.Work, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not work.is_completed():
            if time.monotonic() >= end:
                return False
            os.sched_yield()
        work.wait()  # the current stream now comes after it; raises what went wrong
        return True
