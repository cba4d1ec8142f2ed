"""A part of all layouts of all generators; `benchmarks/every_layout.py` proves the rest."""

from __future__ import annotations

import pytest

from pipert.scheduler.generators.registry import GENERATORS
from tests.scheduler.every_layout import Layout, layouts, prove

#: One layout in so many.
STEP = 128


@pytest.mark.parametrize("name", GENERATORS)
def test_layouts_of_every_size_are_proved_and_simulated_on_three_transports(name: str) -> None:
    part = [layout for layout in layouts() if layout.name == name][::STEP]
    edges = [Layout(name, ranks, microbatches, 1) for ranks in (1, 2) for microbatches in (1, 2)]
    assert all(prove(layout) > 0 for layout in (*part, *edges))
