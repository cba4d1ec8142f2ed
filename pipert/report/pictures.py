"""Pictures of a run: the measured pipeline beside the predicted one, drawn and as a trace."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipert.scheduler.action import Kind
from pipert.scheduler.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {Kind.F: "#5b8ff9", Kind.B: "#f6bd60", Kind.I: "#f6bd60", Kind.W: "#84a98c"}
_OTHER = "#b0a8b9"
_LABELS = 400


def save_pictures(named: Sequence[tuple[str, Timeline]], folder: Path) -> tuple[Path, ...]:
    """Draw timelines above one another on one time axis.

    Args:
        named: title and timeline of each, in seconds; each is moved to start at 0.
        folder: where ``pipeline.svg``, ``pipeline.png`` and ``pipeline.trace.json`` go. The trace opens in Perfetto
            (https://ui.perfetto.dev) or chrome://tracing; every range has the name of its action, such as ``2F0``.

    Returns:
        the files.
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG  # without pyplot: no global state, no display
    from matplotlib.figure import Figure

    moved = [(title, timeline.from_zero()) for title, timeline in named]
    rows = sum(timeline.num_ranks for _, timeline in moved)
    figure = Figure(figsize=(14, 0.9 * len(moved) + 0.45 * rows), layout="constrained")
    FigureCanvasSVG(figure)
    heights = [timeline.num_ranks for _, timeline in moved]
    axes = figure.subplots(len(moved), sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for place, (title, timeline) in zip(axes, moved, strict=True):
        _draw(place, title, timeline)
    axes[-1].set_xlabel("milliseconds")
    folder.mkdir(parents=True, exist_ok=True)
    paths = tuple(folder / f"pipeline.{ending}" for ending in ("svg", "png", "trace.json"))
    figure.savefig(paths[0], metadata={"Date": None})
    figure.savefig(paths[1], dpi=130)
    paths[2].write_text(trace(moved), encoding="utf-8")
    return paths


def _draw(axes: Axes, title: str, timeline: Timeline) -> None:
    """One timeline: a lane a rank, computations as boxes with their names, sums of gradients as thin bars below."""
    bars: defaultdict[tuple[int, Kind], list[tuple[float, float]]] = defaultdict(list)
    for rank, action, start, end in timeline:
        left, width = 1e3 * start, 1e3 * (end - start)
        bars[rank, action.kind].append((left, width))
        if action.kind.is_compute and len(timeline) <= _LABELS and end - start > 0.012 * timeline.makespan:
            axes.text(left + width / 2, rank, str(action), ha="center", va="center", fontsize=6, clip_on=True)
    for (rank, kind), spans in bars.items():
        if kind.is_compute:
            axes.broken_barh(spans, (rank - 0.4, 0.8), color=_COLOURS[kind], edgecolor="white", linewidth=0.4)
        elif not kind.is_message:
            axes.broken_barh(spans, (rank + 0.4, 0.1), color=_OTHER)
    axes.set_title(f"{title}: {1e3 * timeline.makespan:.1f} ms, bubble {timeline.bubble:.1%}", loc="left", fontsize=10)
    axes.set_yticks(range(timeline.num_ranks), [f"rank {rank}" for rank in range(timeline.num_ranks)])
    axes.set_ylim(timeline.num_ranks - 0.4, -0.6)
    axes.spines[["top", "right"]].set_visible(False)


def trace(named: Sequence[tuple[str, Timeline]]) -> str:
    """Timelines as a Chrome trace (JSON): a process for each timeline, two threads for each rank.

    The second thread holds messages and sums of gradients, which overlap computations. Times are in microseconds.
    """
    events: list[dict[str, Any]] = []
    for process, (title, timeline) in enumerate(named):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": title}})
        for rank in range(timeline.num_ranks):
            for thread, name in ((2 * rank, f"rank {rank}"), (2 * rank + 1, f"rank {rank} messages")):
                events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}})
        for rank, action, start, end in timeline:
            event = {"ph": "X", "name": str(action), "cat": action.kind.name, "pid": process}
            thread = 2 * rank + (not action.kind.is_compute)
            events.append({**event, "tid": thread, "ts": 1e6 * start, "dur": 1e6 * (end - start)})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
