"""What the tests of the communication package share."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from hypothesis import strategies as st

from pipert.comm.faults import Faults

# Delays that cost no time; a test that wants losses, kills or real time writes its own plan.
st.register_type_strategy(
    Faults,
    st.builds(Faults, seed=st.integers(0, 2**32), delay=st.sampled_from([0.5, 3.0]), reorder=st.booleans()),
)


@pytest.fixture
def no_thread_is_left_behind() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before
