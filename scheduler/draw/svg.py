"""Timelines as a standalone SVG: one lane a rank, several timelines above one another on one time axis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from pipert.scheduler.action import KIND_MASK, KIND_SHIFT, MICROBATCH_MASK, STAGE_SHIFT, Action, Kind
from pipert.scheduler.costs import Costs
from pipert.scheduler.draw.palette import NAMES, colour, is_light, share
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.simulate import simulate
from pipert.scheduler.timeline import Timeline

# Pixels.
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 82, 20, 66
_HEAD, _LANE, _GAP, _BETWEEN = 30, 26, 5, 20
_STRIP, _DIGIT, _LINE = 4, 6.4, 18

#: Messages are drawn at the rank that sends them.
RECEIVES = {kind for kind in Kind if kind.is_message and not kind.is_send}

#: Boxes in a picture up to which each has a tooltip.
_TOOLTIPS = 4_000

_STYLE = """<style>
text { font-family: Inter, system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1c2128; }
.page { fill: #ffffff; stroke: #d8dee4; } .lane { fill: #eef1f5; } .grid { stroke: #8c959f; stroke-opacity: 0.28; }
.title { font-size: 14px; font-weight: 600; } .rank { font-size: 12px; }
.note { fill: #59636e; font-size: 11.5px; }
.label { fill: #ffffff; font-size: 10.5px; font-weight: 600; } .ink { fill: #1c2128; }
.end { text-anchor: end; } .middle { text-anchor: middle; } .label { text-anchor: middle; pointer-events: none; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; } .note { fill: #9198a1; }
.page { fill: #0d1117; stroke: #30363d; } .lane { fill: #1d242d; }
}
</style>"""


@dataclass(frozen=True)
class _Scale:
    """From times to pixels and texts."""

    span: float
    pixels: float
    unit: str

    def x(self, time: float) -> float:
        return _LEFT + (time / self.span * self.pixels if self.span else 0.0)

    def text(self, time: float) -> str:
        """A time with its unit; seconds as s, ms or µs, whichever suits the whole picture."""
        if self.unit != "s":
            return f"{time:.4g} {self.unit}".strip()
        for factor, name in ((1.0, "s"), (1e3, "ms")):
            if self.span * factor >= 1:
                return f"{time * factor:.4g} {name}"
        return f"{time * 1e6:.4g} µs"

    def ticks(self) -> Iterator[float]:
        """Round times, about one every 90 pixels."""
        if self.span > 0:
            raw = self.span * 90 / self.pixels
            power = 10.0 ** math.floor(math.log10(raw))
            step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
            yield from (step * tick for tick in range(int(self.span / step * (1 + 1e-9)) + 1))


def svg(*targets: Timeline | Schedule, width: int = 960, unit: str = "") -> str:
    """Draw timelines, one above the other, on one time axis (predicted and measured, or several schedules).

    Args:
        targets: what to draw; each is moved to start at 0. A schedule is simulated without communication, with a
            forward of all stages of a rank as the unit and a backward of two.
        width: of the picture, in pixels.
        unit: of the times; ``"s"`` shows them in s, ms or µs as suits.

    Returns:
        A standalone SVG document. It has its own background and follows the reader's light or dark scheme.
    """
    drawn = [(target if isinstance(target, Timeline) else _played(target)).from_zero() for target in targets]
    scale = _Scale(max((timeline.end for timeline in drawn), default=0.0), width - _LEFT - _RIGHT, unit)
    tops = [_TOP]
    for timeline in drawn:
        tops.append(tops[-1] + _HEAD + timeline.num_ranks * (_LANE + _GAP) + _BETWEEN)
    bottom = tops[-1] - _BETWEEN
    legend = list(_legend(drawn, width))
    height = bottom + _BOTTOM + _LINE * legend[-1].line
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        _STYLE,
        f'<rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
    ]
    for top, timeline in zip(tops, drawn, strict=False):
        parts += _panel(timeline, top, scale)
        parts += _grid(top + _HEAD, top + _HEAD + timeline.num_ranks * (_LANE + _GAP) - _GAP, scale)
        for rank in range(timeline.num_ranks):
            parts += _lane(timeline, rank, top + _HEAD + rank * (_LANE + _GAP), scale)
    return "\n".join([*parts, *_axis(bottom, scale), *_explained(legend, bottom + 38), "</svg>", ""])


def _played(schedule: Schedule) -> Timeline:
    """A schedule in units of one rank's forward; a rank with several stages has smaller ones."""
    unit = schedule.num_ranks / schedule.num_stages
    return simulate(schedule, Costs(forward=unit, backward=2 * unit))


def _panel(timeline: Timeline, top: int, scale: _Scale) -> Iterator[str]:
    """One timeline without its boxes: title, figures, and for each rank its name, lane and share of busy time."""
    right = _LEFT + scale.pixels
    yield _text("title", _LEFT, top + 14, timeline.name)
    figures = f"makespan {scale.text(timeline.makespan)}  ·  bubble {timeline.bubble:.1%}  ·  {_peaks(timeline)}"
    yield _text("note end", right, top + 14, figures)
    for rank, busy in enumerate(timeline.busy):
        y = top + _HEAD + rank * (_LANE + _GAP)
        yield _text("rank end", _LEFT - 12, y + 17, f"rank {rank}")
        yield f'<rect class="lane" x="{_LEFT}" y="{y}" width="{scale.pixels:g}" height="{_LANE}" rx="3"/>'
        yield _text("note", right + 12, y + 17, f"{busy / timeline.makespan if timeline.makespan else 0:.0%} busy")


def _peaks(timeline: Timeline) -> str:
    peaks = timeline.peaks
    if len(peaks) > 8:
        return f"peak live {max(peaks)}"
    return f"peak live {', '.join(map(str, peaks)) if len(set(peaks)) > 1 else peaks[0]}"


def _lane(timeline: Timeline, rank: int, y: int, scale: _Scale) -> Iterator[str]:
    """What one rank did: computations as boxes, messages and collectives as strips under them."""
    codes, starts, ends = timeline.lane(rank)
    actions = [Action.from_code(code) for code in codes.tolist()]
    stages = sorted({action.stage for action in actions})
    batches = 1 + max((action.microbatch for action in actions if action.kind.is_compute), default=0)
    height = _LANE - (_STRIP + 1 if any(not action.kind.is_compute for action in actions) else 0)
    full = len(stages) > 1 and _has_room(timeline, scale)
    reached = {True: -math.inf, False: -math.inf}
    for action, start, end in zip(actions, starts.tolist(), ends.tolist(), strict=True):
        if action.kind in RECEIVES:
            continue  # the sender's strip says it all
        computes = action.kind.is_compute
        left, right = scale.x(start), scale.x(end)
        if right < reached[computes] + 0.2:
            continue  # nobody could see it
        reached[computes] = right
        fill = colour(action.kind, share(stages.index(action.stage), len(stages)), share(action.microbatch, batches))
        tip = f"{action}  {scale.text(start)} – {scale.text(end)}" if len(timeline) <= _TOOLTIPS else ""
        top, tall = (y, height) if computes else (y + height + 1, _STRIP)
        yield _box(left, top, right - left, tall, fill, tip)
        label = str(action) if full else str(action.microbatch)
        if computes and _DIGIT * len(label) + 2 <= right - left:
            yield _text("label ink" if is_light(fill) else "label", (left + right) / 2, top + height / 2 + 4, label)


def _box(x: float, y: float, width: float, height: float, fill: str, tip: str) -> str:
    """A box with a hair of space behind it."""
    wide = max(width - (0.9 if width > 3 else 0.3 if width > 1 else 0), 0.3)
    round_corners = f' rx="{min(2.5, wide / 4):.1f}"' if wide > 3 else ""
    box = f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{height}" fill="{fill}"{round_corners}'
    return f"{box}><title>{escape(tip)}</title></rect>" if tip else f"{box}/>"


def _has_room(timeline: Timeline, scale: _Scale) -> bool:
    """Whether every computation has room for its full name, not only for its micro-batch."""
    drawn = timeline.computation()
    stage, microbatch = (drawn.codes >> STAGE_SHIFT).max(initial=0), (drawn.codes & MICROBATCH_MASK).max(initial=0)
    longest = len(str(Action(int(stage), Kind.F, int(microbatch))))
    shortest = float((drawn.ends - drawn.starts).min(initial=math.inf))
    return _DIGIT * longest + 2 <= scale.x(shortest) - _LEFT


def _grid(top: int, bottom: int, scale: _Scale) -> Iterator[str]:
    for tick in scale.ticks():
        yield f'<line class="grid" x1="{scale.x(tick):.1f}" y1="{top}" x2="{scale.x(tick):.1f}" y2="{bottom}"/>'


def _axis(y: int, scale: _Scale) -> Iterator[str]:
    for tick in scale.ticks():
        yield _text("note middle", scale.x(tick), y + 12, scale.text(tick))


@dataclass(frozen=True)
class _Entry:
    """A word of the legend, behind a box of its colour if it has one, and where it stands."""

    words: str
    fill: str
    x: float
    line: int


def _legend(drawn: Sequence[Timeline], width: int) -> Iterator[_Entry]:
    """The kinds that occur, each with its colour, and what numbers and shades mean; in as many lines as it takes."""
    kinds = {Kind(kind) for one in drawn for kind in set((one.codes >> KIND_SHIFT & KIND_MASK).tolist())}
    entries = [(NAMES[kind], colour(kind)) for kind in sorted(kinds) if kind in NAMES]
    entries += [("message", colour(Kind.SEND_F))] if any(kind.is_message for kind in kinds) else []
    several = any(len(set((one.lane(0).codes >> STAGE_SHIFT).tolist())) > 1 for one in drawn)
    entries.append(("number: micro-batch" + (", lighter: later stage of the rank" if several else ""), ""))
    x, line = float(_LEFT), 0
    for words, fill in entries:
        wide = 18 * bool(fill) + 6.2 * len(words)
        if x + wide > width and x > _LEFT:
            x, line = float(_LEFT), line + 1
        yield _Entry(words, fill, x, line)
        x += wide + 22


def _explained(legend: Iterable[_Entry], y: int) -> Iterator[str]:
    for entry in legend:
        x, top = entry.x, y + _LINE * entry.line
        if entry.fill:
            yield f'<rect x="{x:.1f}" y="{top}" width="12" height="12" rx="2.5" fill="{entry.fill}"/>'
            x += 18
        yield _text("note", x, top + 10, entry.words)


def _text(style: str, x: float, y: float, text: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
