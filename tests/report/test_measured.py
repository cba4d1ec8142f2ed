"""Measured timelines give the costs that a prediction needs."""

from __future__ import annotations

import pytest

from pipert.errors import ConfigError
from pipert.report.measured import measured_costs, typical
from pipert.scheduler.action import Action, Kind
from pipert.scheduler.costs import Costs
from pipert.scheduler.generators.registry import generate
from pipert.scheduler.lower import lower
from pipert.scheduler.semantics import MPI
from pipert.scheduler.simulate import simulate
from pipert.scheduler.timeline import Timeline

FORWARD, BACKWARD = (0.010, 0.030), (0.020, 0.050)
COSTS = Costs(FORWARD, BACKWARD)


def simulated(scale: float = 1.0) -> Timeline:
    costs = Costs([scale * cost for cost in FORWARD], [scale * cost for cost in BACKWARD])
    return simulate(generate("1f1b", 2, 4), costs)


def test_the_costs_of_a_simulated_run_are_the_ones_it_was_simulated_with() -> None:
    assert measured_costs([simulated()], 2).table(2) == pytest.approx(COSTS.table(2))
    mixed = measured_costs([simulated(1.0), simulated(3.0), simulated(1.0)], 2)
    assert mixed.table(2) == pytest.approx(COSTS.table(2))


def test_backwards_in_halves_are_measured_as_halves() -> None:
    row = [Action(0, Kind.F), Action(0, Kind.I), Action(0, Kind.W)]
    timeline = Timeline.of("x", [([action.code for action in row], [0.0, 1.0, 3.0], [1.0, 3.0, 6.0])])
    costs = measured_costs([timeline], 1)
    assert (costs.forward, costs.input_gradient, costs.weight_gradient, costs.backward) == (
        (1.0,),
        (2.0,),
        (3.0,),
        (5.0,),
    )


def test_a_stage_that_was_not_measured_costs_nothing() -> None:
    assert measured_costs([simulated()], 3).table(3)[Kind.F].tolist() == pytest.approx([0.01, 0.03, 0.0])


def test_predicting_from_a_simulated_run_gives_that_run() -> None:
    program = lower(generate("1f1b", 2, 4), MPI)
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
