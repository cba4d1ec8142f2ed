"""Schedules and timelines as text: the order of a schedule's actions, or what each rank does over time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pipert.scheduler.action import Action, Kind
from pipert.scheduler.draw.palette import colour, share
from pipert.scheduler.program import Program
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.timeline import Timeline

#: What fills a bar behind its label, by kind.
_FILL = {Kind.F: "─", Kind.B: "━", Kind.I: "═", Kind.W: "~", Kind.S: "+", Kind.T: "-", Kind.G: "-"}

#: At most this many columns for the shortest action; more would not be easier to read.
_WIDEST = 8

#: How actions are labelled; the fullest form that fits everywhere is used.
_FORMS: tuple[Callable[[Action], str], ...] = (
    lambda action: f"{action} ",
    lambda action: f"{action.kind.name}{action.microbatch}",
    lambda action: str(action.microbatch),
    lambda action: "",
)


def text(target: Schedule | Program | Timeline, *, width: int = 100, colours: bool = False) -> str:
    """Draw a schedule or program in the order of its rows, a timeline over time.

    Args:
        target: what to draw.
        width: columns to use; what does not fit is cut (``…``), and a timeline is scaled to fit.
        colours: whether to colour the actions by kind (24-bit ANSI).
    """
    lines = _over_time(target, width, colours) if isinstance(target, Timeline) else _in_order(target, width, colours)
    return "\n".join(lines)


def _in_order(target: Schedule | Program, width: int, colours: bool) -> Iterator[str]:
    """One line a rank, one column an action."""
    if not target.rows:
        return
    names = _names(target.num_ranks)
    room = max(width - len(names[0]) - 1, 8)
    rows = [list(row[:room]) for row in target.rows]
    cell = max((len(str(action)) for row in rows for action in row), default=0) + 1
    fits = max(room // cell, 1)
    for name, row, whole in zip(names, rows, target.rows, strict=True):
        shown = row if len(whole) <= fits else row[: fits - 1]
        stages = sorted(set(whole.stages.tolist()))
        cells = [
            _painted(word, action, stages, target.microbatches, colours) + " " * (cell - len(word))
            for action, word in zip(shown, map(str, shown), strict=True)
        ]
        yield f"{name}│{''.join(cells)}{'…' if len(shown) < len(whole) else ''}".rstrip()


class _Bar(NamedTuple):
    """An action between two columns."""

    action: Action
    left: int
    right: int


def _over_time(timeline: Timeline, width: int, colours: bool) -> Iterator[str]:
    """One line a rank, time from left to right; computations only."""
    names = _names(timeline.num_ranks)
    drawn = timeline.from_zero().computation()
    columns = _columns(drawn, timeline.makespan, max(width - len(names[0]) - 2, 8))
    lanes = [_bars(drawn, rank, columns / (timeline.makespan or 1.0)) for rank in range(drawn.num_ranks)]
    bars = [bar for lane in lanes for bar in lane]
    several = len({bar.action.stage for bar in bars}) > timeline.num_ranks
    forms = _FORMS if several else _FORMS[1:]
    form = next(one for one in forms if all(len(one(bar.action)) <= bar.right - bar.left for bar in bars))
    batches = 1 + max((bar.action.microbatch for bar in bars), default=0)
    for name, lane in zip(names, lanes, strict=True):
        stages = sorted({bar.action.stage for bar in lane})
        line, at = "", 0
        for action, left, right in lane:
            label = f"{form(action).strip():{_FILL[action.kind]}<{right - left}}"
            line += "·" * (left - at) + _painted(label, action, stages, batches, colours)
            at = right
        yield f"{name}│{line}{'·' * (columns - at)}│"
    yield f"{'':{len(names[0])}} 0{timeline.makespan:>{columns - 1}.6g}"


def _columns(drawn: Timeline, span: float, room: int) -> int:
    """How many columns the makespan gets: all there are, or where actions last whole units, a number for each unit."""
    lasting = drawn.ends - drawn.starts
    shortest = float(lasting[lasting > 0].min(initial=np.inf))
    units = span / shortest
    each = min(int(room / units), _WIDEST) if units else 0
    whole = np.abs(np.append(lasting, span) / shortest % 1.0 - 0.5) > 0.499
    return round(units * each) if each and whole.all() else room


def _bars(drawn: Timeline, rank: int, scale: float) -> list[_Bar]:
    """The actions of a rank that are wide enough to be seen, without overlaps."""
    codes, starts, ends = drawn.lane(rank)
    bars, at = [], 0
    for code, start, end in zip(codes.tolist(), starts.tolist(), ends.tolist(), strict=True):
        left, right = max(round(start * scale), at), round(end * scale)
        if right > left:
            bars.append(_Bar(Action.from_code(code), left, right))
            at = right
    return bars


def _painted(label: str, action: Action, stages: Sequence[int], batches: int, colours: bool) -> str:
    if not colours:
        return label
    shade = colour(action.kind, share(list(stages).index(action.stage), len(stages)), share(action.microbatch, batches))
    red, green, blue = (int(shade[at : at + 2], 16) for at in (1, 3, 5))
    return f"\x1b[38;2;255;255;255;48;2;{red};{green};{blue}m{label}\x1b[0m"


def _names(ranks: int) -> list[str]:
    width = len(str(ranks - 1))
    return [f"rank {rank:>{width}} " for rank in range(ranks)]
