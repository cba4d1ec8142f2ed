"""Timelines as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pipert.scheduler.timeline import Timeline

_MICROSECONDS = 1e6


def chrome_trace(*timelines: Timeline) -> str:
    """Write timelines (times in seconds) as a trace: each a process, each rank a thread, each action a range.

    Ranges are named as the actions are (``2F0``). A rank computes one action after another, so its computations are
    the ranges of its thread; messages and collectives may overlap them and one another, so they are asynchronous ranges
    beside it. Every timeline starts at 0.

    Returns:
        JSON in the Trace Event Format.
    """
    events: list[dict[str, Any]] = []
    for process, timeline in enumerate(timelines):
        events += _named(process, timeline)
        events += _events(process, timeline.from_zero())
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _named(process: int, timeline: Timeline) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": timeline.name}}
    for rank in range(timeline.num_ranks):
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": rank, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": rank, "args": {"sort_index": rank}}


def _events(process: int, timeline: Timeline) -> Iterator[dict[str, Any]]:
    for number, (rank, action, start, end) in enumerate(timeline):
        event = {
            "name": str(action),
            "cat": action.kind.name,
            "pid": process,
            "tid": rank,
            "ts": start * _MICROSECONDS,
        }
        if action.kind.is_compute:
            arguments = {"stage": action.stage, "micro-batch": action.microbatch}
            yield event | {"ph": "X", "dur": (end - start) * _MICROSECONDS, "args": arguments}
        else:
            yield event | {"ph": "b", "id": number}
            yield event | {"ph": "e", "id": number, "ts": end * _MICROSECONDS}
