"""What the tests of the communication package share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import strategies as st

from pipert.comm.faults import Faults
from pipert.comm.local import current_transport
from pipert.comm.mesh import Mesh
from pipert.comm.mixed import MixedTransport
from tests.comm.standin.build import build_standin

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


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A librccl for machines without a GPU; see tests/comm/standin."""
    return build_standin(tmp_path_factory.mktemp("rccl"))


@pytest.fixture
def rccl(standin: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, and in this test it is the RCCL that pipert finds."""
    monkeypatch.setenv("PIPERT_RCCL", str(standin))
    return standin


@pytest.fixture
def local_meshes_over_rccl(rccl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this test ``Mesh.local`` moves tensors over RCCL, so that tests of the engine can be run again over it."""

    def local(pp: int = 1, dp: int = 1, tp: int = 1) -> Mesh:
        transport = current_transport()
        assert transport is not None
        return Mesh.from_transport(MixedTransport.over(transport), pp=pp, dp=dp, tp=tp)

    monkeypatch.setattr(Mesh, "local", local)
