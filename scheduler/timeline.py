"""Timeline: what every rank did and when, simulated or measured alike."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipert.scheduler.action import KIND_MASK, KIND_SHIFT, MAX_STAGES, STAGE_SHIFT, Action, Kind
from pipert.scheduler.errors import ScheduleError, TimelineError
from pipert.scheduler.live import ENDS, live_changes
from pipert.scheduler.row import ActionRow, Codes
from pipert.scheduler.summary import Summary

Seconds = npt.NDArray[np.float64]

_FORMAT = "pipert-timeline"
_COMPUTES = np.array([kind.is_compute for kind in Kind])


class Lane(NamedTuple):
    """What one rank did: packed codes, starts and ends, in the order in which its row has them."""

    codes: Codes
    starts: Seconds
    ends: Seconds


@dataclass(frozen=True, eq=False)
class Timeline:
    """Rows ``(rank, action, start, end)`` in seconds (or the unit of the costs), kept as arrays.

    A rank computes one action after another; its messages and collectives may overlap them. Timelines compare by value
    and round-trip through JSON without loss.

    Attributes:
        name: what ran, for example ``1f1b``.
        offsets: where each rank's rows start, int64 ``[ranks + 1]``.
        codes: the packed actions, rank 0's in order, then rank 1's, … int64 ``[actions]``.
        starts: when each started, float64 ``[actions]``.
        ends: when each ended, float64 ``[actions]``.
    """

    name: str
    offsets: npt.NDArray[np.int64]
    codes: Codes
    starts: Seconds
    ends: Seconds

    def __post_init__(self) -> None:
        for array in (self.offsets, self.codes, self.starts, self.ends):
            array.flags.writeable = False
        if not len(self.codes) == len(self.starts) == len(self.ends) == (self.offsets[-1] if len(self.offsets) else -1):
            sizes = f"{len(self.codes)} actions, {len(self.starts)} starts, {len(self.ends)} ends"
            raise TimelineError(f"{sizes}; give each action one start and one end")
        if not bool((self.ends >= self.starts).all()):  # also false for what is not a number
            wrong = int(np.argmin(self.ends >= self.starts))
            action, times = Action.from_code(int(self.codes[wrong])), f"{self.starts[wrong]} to {self.ends[wrong]}"
            raise TimelineError(f"{action} lasts from {times}; an action must not end before it starts")

    @classmethod
    def of(cls, name: str, lanes: Iterable[tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]]) -> Timeline:
        """Build from each rank's packed codes, starts and ends (as a runtime records them)."""
        columns = [
            (np.asarray(codes, np.int64), np.asarray(starts, np.float64), np.asarray(ends, np.float64))
            for codes, starts, ends in lanes
        ]
        if not columns:
            raise TimelineError("a timeline needs at least one rank")
        offsets = np.cumsum([0, *(len(codes) for codes, _, _ in columns)], dtype=np.int64)
        codes, starts, ends = (np.concatenate(arrays) for arrays in zip(*columns, strict=True))
        return cls(name, offsets, codes, starts, ends)

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self.offsets) - 1

    def __len__(self) -> int:
        return len(self.codes)

    def lane(self, rank: int) -> Lane:
        """What one rank did."""
        span = slice(self.offsets[rank], self.offsets[rank + 1])
        return Lane(self.codes[span], self.starts[span], self.ends[span])

    def __iter__(self) -> Iterator[tuple[int, Action, float, float]]:
        for rank in range(self.num_ranks):
            codes, starts, ends = self.lane(rank)
            for code, start, end in zip(codes.tolist(), starts.tolist(), ends.tolist(), strict=True):
                yield rank, Action.from_code(code), start, end

    @property
    def start(self) -> float:
        """When the first action starts."""
        return float(self.starts.min()) if len(self) else 0.0

    @property
    def end(self) -> float:
        """When the last action ends."""
        return float(self.ends.max()) if len(self) else 0.0

    @property
    def makespan(self) -> float:
        """From the first start to the last end."""
        return self.end - self.start

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For each rank the time it computes."""
        seconds = np.where(_COMPUTES[self.codes >> KIND_SHIFT & KIND_MASK], self.ends - self.starts, 0.0)
        return tuple(float(seconds[start:stop].sum()) for start, stop in pairwise(self.offsets.tolist()))

    @property
    def idle(self) -> tuple[float, ...]:
        """For each rank the part of the makespan in which it does not compute."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def idle_within(self) -> tuple[float, ...]:
        """For each rank the time between its own first start and last end in which it does not compute.

        What counts where a rank may begin the next step while others end this one.
        """
        spans = (self.lane(rank) for rank in range(self.num_ranks))
        lasts = [float(lane.ends.max() - lane.starts.min()) if len(lane.codes) else 0.0 for lane in spans]
        return tuple(last - busy for last, busy in zip(lasts, self.busy, strict=True))

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they do not compute: idle / (ranks · makespan)."""
        return sum(self.idle) / (self.num_ranks * self.makespan) if self.makespan else 0.0

    def live(self, rank: int) -> tuple[Seconds, npt.NDArray[np.int64]]:
        """The micro-batches whose activations a rank keeps, over time.

        A forward's start adds one, the end of its backward (of W where it is in halves) takes it away. Stages that
        have no backward at all keep nothing.

        Returns:
            The times at which the number changes, and the number from then on.
        """
        codes, starts, ends = self.lane(rank)
        changes = live_changes(codes, self._trainable_from)
        here = np.flatnonzero(changes)
        return np.where(changes[here] > 0, starts[here], ends[here]), np.cumsum(changes[here])

    @property
    def peaks(self) -> tuple[int, ...]:
        """For each rank the most micro-batches that are live at once."""
        return tuple(int(self.live(rank)[1].max(initial=0)) for rank in range(self.num_ranks))

    def summary(self) -> Summary:
        """The figures without the actions."""
        return Summary(self.name, len(self), self.makespan, self.busy, self.idle_within, self.peaks)

    @cached_property
    def _trainable_from(self) -> int:
        backward = self.codes[np.isin(self.codes >> KIND_SHIFT & KIND_MASK, ENDS)]
        return int((backward >> STAGE_SHIFT).min()) if len(backward) else MAX_STAGES

    def computation(self) -> Timeline:
        """The same without messages and collectives."""
        keep = _COMPUTES[self.codes >> KIND_SHIFT & KIND_MASK]
        counts = [int(keep[start:stop].sum()) for start, stop in pairwise(self.offsets.tolist())]
        offsets = np.cumsum([0, *counts], dtype=np.int64)
        return Timeline(self.name, offsets, self.codes[keep], self.starts[keep], self.ends[keep])

    def from_zero(self) -> Timeline:
        """The same, moved so that the first action starts at 0."""
        return Timeline(self.name, self.offsets, self.codes, self.starts - self.start, self.ends - self.start)

    def named(self, name: str) -> Timeline:
        """The same under another name."""
        return Timeline(name, self.offsets, self.codes, self.starts, self.ends)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Timeline):
            return NotImplemented
        arrays = zip(self._arrays, other._arrays, strict=True)
        return self.name == other.name and all(np.array_equal(mine, theirs) for mine, theirs in arrays)

    def __hash__(self) -> int:
        return hash((self.name, *(array.tobytes() for array in self._arrays)))

    @property
    def _arrays(self) -> tuple[npt.NDArray[np.generic], ...]:
        return self.offsets, self.codes, self.starts, self.ends

    def __str__(self) -> str:
        return str(self.summary())

    def to_json(self) -> str:
        """The timeline as JSON text."""
        lanes = map(self.lane, range(self.num_ranks))
        ranks = [
            {"actions": str(ActionRow.from_codes(codes)), "starts": starts.tolist(), "ends": ends.tolist()}
            for codes, starts, ends in lanes
        ]
        return json.dumps({"format": _FORMAT, "version": 1, "name": self.name, "ranks": ranks})

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """Read what `to_json` wrote.

        Raises:
            TimelineError: the text is no timeline.
        """
        try:
            data = json.loads(text)
            if data["format"] != _FORMAT or data["version"] != 1:
                raise TimelineError(f"{data['format']!r} version {data['version']!r} is not {_FORMAT!r} version 1")
            lanes = [(ActionRow.parse(rank["actions"]).codes, rank["starts"], rank["ends"]) for rank in data["ranks"]]
            return cls.of(data["name"], lanes)
        except TimelineError:
            raise
        except (ValueError, KeyError, TypeError, ScheduleError) as error:
            raise TimelineError(f"this text is not a timeline ({error!r}); write one with Timeline.to_json") from error
