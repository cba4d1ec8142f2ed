"""The most bytes that a step's tensors take at once, as torch's allocator counts them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


def peak_bytes(make: Callable[[], Callable[[], object]]) -> int:
    """Make a contestant, let it take two steps, and find its peak in the second one.

    Everything that is alive counts: parameters, gradients, moments, activations, what travels. What is made and freed
    while the contestant is built does not.

    Args:
        make: builds the contestant; returns its step.
    """
    gc.collect()  # what is left of others must not be freed in between
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = make()
        step()
        begin = time.time_ns()
        step()
        end = time.time_ns()
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    alive = accumulate(event.nbytes() for event in events)
    within = [total for event, total in zip(events, alive, strict=True) if begin <= event.start_ns() <= end]
    return max(within)
