"""What measured timelines say: a typical one, and the costs that a prediction needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean, median, median_low

from pipert.errors import ConfigError
from pipert.scheduler.action import Action, Kind
from pipert.scheduler.costs import Costs
from pipert.scheduler.timeline import Timeline


def typical(timelines: Sequence[Timeline]) -> Timeline:
    """The timeline whose makespan is the median one.

    Raises:
        ConfigError: there is none.
    """
    if not timelines:
        raise ConfigError("no step was measured; gather a timeline after at least one step")
    middle = median_low(timeline.makespan for timeline in timelines)
    return next(timeline for timeline in timelines if timeline.makespan == middle)


def measured_costs(
    timelines: Sequence[Timeline], num_stages: int, usual: Callable[[Sequence[float]], float] = median
) -> Costs:
    """The duration of each kind of computation on each stage. Messages cost nothing.

    That of one action is the usual one of the steps, that of a kind and stage the mean over its micro-batches: they are
    not alike (the first one's weight gradients are taken, later ones are added), and a rank's work is their sum.

    Simulating with these tells how long the same computations take in the same order when nobody waits for anything but
    data, so the difference to what was measured is the runtime and its messages.

    Args:
        timelines: of some steps.
        num_stages: stages of the pipeline; one without a measurement costs 0.
        usual: of an action's times in the steps.
    """
    durations: defaultdict[Action, list[float]] = defaultdict(list)
    for timeline in timelines:
        for _, action, start, end in timeline:
            if action.kind.is_compute:
                durations[action].append(end - start)
    seconds: defaultdict[tuple[Kind, int], list[float]] = defaultdict(list)
    for action, times in durations.items():
        seconds[action.kind, action.stage].append(usual(times))
    cost = {
        kind: tuple(fmean(seconds.get((kind, stage), [0.0])) for stage in range(num_stages))
        for kind in Kind
        if kind.is_compute
    }
    shards = {"logits": cost[Kind.S], "head_gradient": cost[Kind.T], "embedding_gradient": cost[Kind.G]}
    halves = tuple(a + b for a, b in zip(cost[Kind.I], cost[Kind.W], strict=True))
    if not any(halves):
        return Costs(forward=cost[Kind.F], backward=cost[Kind.B], **shards)
    whole = tuple(max(pair) for pair in zip(cost[Kind.B], halves, strict=True))
    return Costs(cost[Kind.F], whole, input_gradient=cost[Kind.I], weight_gradient=cost[Kind.W], **shards)
