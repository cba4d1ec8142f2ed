"""Pictures of a run: the measured pipeline beside the predicted one, drawn and as a trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipert.scheduler.action import Kind
from pipert.scheduler.draw.palette import NAMES, colour, share
from pipert.scheduler.draw.svg import svg
from pipert.scheduler.timeline import Timeline
from pipert.scheduler.trace import chrome_trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LABELS = 400


def save_pictures(*timelines: Timeline, folder: Path) -> tuple[Path, ...]:
    """Draw timelines above one another on one time axis.

    Args:
        timelines: in seconds; each is moved to start at 0, and titled with its name.
        folder: where ``pipeline.svg``, ``pipeline.png`` and ``pipeline.trace.json`` go. The trace opens in Perfetto
            (https://ui.perfetto.dev); every range has the name of its action, such as ``2F0``.

    Returns:
        the files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    picture, image, trace = (folder / f"pipeline.{ending}" for ending in ("svg", "png", "trace.json"))
    picture.write_text(svg(*timelines, unit="s"), encoding="utf-8")
    save_png(*timelines, path=image)
    trace.write_text(chrome_trace(*timelines), encoding="utf-8")
    return picture, image, trace


def save_png(*timelines: Timeline, path: Path) -> None:
    """The same drawing as a PNG, for viewers that show no SVG."""
    from matplotlib.figure import Figure  # not pyplot, which has global state and may want a display

    lanes = [timeline.num_ranks for timeline in timelines]
    figure = Figure(figsize=(14, 0.9 * len(lanes) + 0.45 * sum(lanes)), layout="constrained")
    panels = figure.subplots(len(lanes), sharex=True, squeeze=False, gridspec_kw={"height_ratios": lanes})[:, 0]
    for panel, timeline in zip(panels, timelines, strict=True):
        _draw(panel, timeline.from_zero())
    panels[-1].set_xlim(left=0.0)
    panels[-1].set_xlabel("milliseconds")
    _explain(panels[0], timelines)
    figure.savefig(path, dpi=130)


def _draw(axes: Axes, timeline: Timeline) -> None:
    """One timeline: a lane a rank, computations as boxes with their names, sums of gradients as strips below."""
    bars: defaultdict[tuple[int, Kind, int], list[tuple[float, float]]] = defaultdict(list)
    stages: defaultdict[int, set[int]] = defaultdict(set)
    for rank, action, start, end in timeline:
        left, width = 1e3 * start, 1e3 * (end - start)
        bars[rank, action.kind, action.stage].append((left, width))
        stages[rank].add(action.stage)
        if action.kind.is_compute and len(timeline) <= _LABELS and end - start > 0.012 * timeline.makespan:
            axes.text(left + width / 2, rank, str(action), ha="center", va="center", fontsize=6, color="white")
    for (rank, kind, stage), spans in bars.items():
        if kind.is_compute:
            tone = colour(kind, share(sorted(stages[rank]).index(stage), len(stages[rank])))
            axes.broken_barh(spans, (rank - 0.4, 0.8), facecolor=tone, edgecolor="white", linewidth=0.4)
        elif not kind.is_message:
            axes.broken_barh(spans, (rank + 0.4, 0.1), facecolor=colour(kind))
    title = f"{timeline.name}: {1e3 * timeline.makespan:.1f} ms, bubble {timeline.bubble:.1%}"
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_yticks(range(timeline.num_ranks), [f"rank {rank}" for rank in range(timeline.num_ranks)])
    axes.set_ylim(timeline.num_ranks - 0.4, -0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _explain(axes: Axes, timelines: Sequence[Timeline]) -> None:
    """Say above a drawing what its colours are."""
    from matplotlib.patches import Patch

    kinds = {action.kind for timeline in timelines for _, action, _, _ in timeline if not action.kind.is_message}
    patches = [Patch(color=colour(kind), label=name) for kind, name in NAMES.items() if kind in kinds]
    if patches:
        axes.legend(
            handles=patches, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(patches), frameon=False, fontsize=8
        )
