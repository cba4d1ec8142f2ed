"""Measured and predicted timelines become one picture and one trace, in which ranges are named as actions."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pipert.errors import ConfigError
from pipert.report.measured import measured_costs, typical
from pipert.report.pictures import save_pictures, trace
from pipert.scheduler.costs import Costs
from pipert.scheduler.generators.registry import generate
from pipert.scheduler.lower import lower
from pipert.scheduler.semantics import Semantics
from pipert.scheduler.simulate import simulate
from pipert.scheduler.timeline import Timeline

COSTS = Costs(forward=(0.010, 0.030), backward=(0.020, 0.050))


def simulated(scale: float = 1.0, microbatches: int = 4) -> Timeline:
    costs = Costs(*(tuple(scale * cost for cost in pair) for pair in (COSTS.forward, COSTS.backward)))
    return simulate(generate("1f1b", 2, microbatches), costs)


def test_the_costs_of_a_simulated_run_are_the_ones_it_was_simulated_with() -> None:
    assert measured_costs([simulated()], 2).table(2) == pytest.approx(COSTS.table(2))
    mixed = measured_costs([simulated(1.0), simulated(3.0), simulated(1.0)], 2)
    assert mixed.table(2) == pytest.approx(COSTS.table(2))


def test_a_stage_that_was_not_measured_costs_nothing() -> None:
    assert measured_costs([simulated()], 3).forward[2] == 0.0


def test_predicting_from_a_simulated_run_gives_that_run() -> None:
    schedule = generate("1f1b", 2, 4)
    program = lower(schedule, Semantics("test"))
    measured = simulate(program, COSTS)
    again = simulate(program, measured_costs([measured], 2))
    assert again.makespan == pytest.approx(measured.makespan)
    assert again.bubble == pytest.approx(measured.bubble)


def test_the_typical_timeline_has_the_median_makespan() -> None:
    one, two, three = simulated(3.0), simulated(1.0), simulated(2.0)
    assert typical([one, two, three]) == three
    assert typical([one, two]) == two
    with pytest.raises(ConfigError, match="no step was measured"):
        typical([])


def test_the_files_are_what_their_endings_say(tmp_path: Path) -> None:
    paths = save_pictures([("measured", simulated()), ("predicted", simulated(0.9))], tmp_path / "deep")
    assert [path.name for path in paths] == ["pipeline.svg", "pipeline.png", "pipeline.trace.json"]
    ElementTree.parse(paths[0])
    assert paths[1].read_bytes().startswith(b"\x89PNG")
    assert "matplotlib.pyplot" not in sys.modules
    names = [event["args"]["name"] for event in json.loads(paths[2].read_text())["traceEvents"] if event["ph"] == "M"]
    assert {"measured", "predicted", "rank 0", "rank 1 messages"} <= set(names)


def test_every_action_is_a_range_of_its_name_and_time() -> None:
    program = lower(generate("1f1b", 2, 3), Semantics("test"))
    timeline = simulate(program, COSTS)
    events = [event for event in json.loads(trace([("x", timeline)]))["traceEvents"] if event["ph"] == "X"]
    expected = [(str(action), 1e6 * start, 1e6 * (end - start)) for _, action, start, end in timeline]
    assert [(event["name"], event["ts"], event["dur"]) for event in events] == expected
    assert {event["name"] for event in events} >= {"0F0", "1B2", "0SEND_F1"}
    for event, (rank, action, _, _) in zip(events, timeline, strict=True):
        assert event["tid"] == 2 * rank + (0 if action.kind.is_compute else 1)


def test_a_picture_with_thousands_of_actions_is_drawn_without_names(tmp_path: Path) -> None:
    paths = save_pictures([("long", simulated(microbatches=300))], tmp_path)
    assert "0F7" not in paths[0].read_text()
