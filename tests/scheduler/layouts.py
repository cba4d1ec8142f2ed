"""Hypothesis strategies: schedules of every kind, every transport there can be, every way to lower."""

from __future__ import annotations

from itertools import product
from typing import Any

from hypothesis import strategies as st

from pipert.scheduler.action import Action, Kind
from pipert.scheduler.generators.registry import GENERATORS, generate
from pipert.scheduler.placement import Placement
from pipert.scheduler.schedule import Schedule
from pipert.scheduler.semantics import Semantics
from pipert.scheduler.vocabulary import Vocabulary

#: Every combination of message rules.
ALL_SEMANTICS = [
    Semantics(f"rules-{number}", buffered, blocking, matching, channel, grouped)
    for number, (buffered, blocking, matching, channel, grouped) in enumerate(
        product((False, True), (False, True), ("tag", "order"), ("message", "pair", "direction", "rank"), (False, True))
    )
]

any_semantics = st.sampled_from(ALL_SEMANTICS)


def v_shaped(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards in halves, down the ranks and up again: hand-overs that stay on a rank."""
    placement, batches = Placement.v(ranks), range(microbatches)
    rows = []
    for rank in range(ranks):
        first, second = placement.stages_of(rank)
        forwards = [Action(stage, Kind.F, m) for stage in (first, second) for m in batches]
        backwards = [Action(stage, kind, m) for stage in (second, first) for kind in (Kind.I, Kind.W) for m in batches]
        rows.append(forwards + backwards)
    return Schedule.of("v-shaped", placement, microbatches, rows)


@st.composite
def schedules(draw: st.DrawFn, ranks: int = 16, chunks: int = 4, microbatches: int = 40) -> Schedule:
    """What the generators make, and a V-shaped schedule with split backwards, up to a size."""
    name = draw(st.sampled_from([*GENERATORS, "v-shaped"]))
    p, m = draw(st.integers(1, ranks)), draw(st.integers(1, microbatches))
    if name == "v-shaped":
        return v_shaped(p, m)
    return generate(name, p, m, draw(st.integers(1, chunks)) if GENERATORS[name].chunked else 1)


@st.composite
def lowering_options(draw: st.DrawFn, schedule: Schedule, spread: bool = False) -> dict[str, Any]:
    """Keyword arguments for `lower`; with `spread` now and then with a spread vocabulary."""
    stages = schedule.num_stages
    trainable_from = draw(st.sampled_from([0, 0, 0, stages]) | st.integers(0, stages))
    trained = range(trainable_from, stages)
    tie = (
        st.lists(st.sampled_from(trained), min_size=2, max_size=4, unique=True).map(tuple) if trained else st.nothing()
    )
    vocabulary = draw(vocabularies(trainable_from)) if spread and draw(st.booleans()) else None
    zero = draw(st.sampled_from([0, 0, 1, 2, 3] if vocabulary is None else [0, 1]))
    return {
        "trainable_from": trainable_from,
        "ties": draw(st.lists(tie, max_size=3)) if len(trained) > 1 else [],
        "reduce": zero > 0 or draw(st.booleans()),
        "zero": zero,
        "alike": draw(st.booleans()),
        "early": draw(st.booleans()),
        "meta": draw(st.sampled_from([(), (0,), tuple(range(schedule.microbatches))])),
        "prefetch": draw(st.integers(0, 3) | st.just(1000)),
        "vocabulary": vocabulary,
        "offload": draw(st.just({}) | st.dictionaries(st.sampled_from(range(stages)), st.integers(1, 3))),
    }


@st.composite
def vocabularies(draw: st.DrawFn, trainable_from: int = 0) -> Vocabulary:
    """Spread, with either part trained or not, as far as gradients get."""
    return Vocabulary(trainable_from == 0 and draw(st.booleans()), draw(st.booleans()))
