"""Libraries to test: for this CPU, and with a GPU's blocks emulated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from pipert.hipkernels.build import build
from pipert.hipkernels.errors import KernelTargetError
from pipert.hipkernels.runtime import Library, use
from pipert.hipkernels.targets import find_target

settings.register_profile("kernels", parent=settings.get_profile("default"), max_examples=25)


def load(target: str) -> Library:
    """The library of this target, built at most once a machine."""
    try:
        found = find_target(target)
    except KernelTargetError as error:
        pytest.skip(str(error))
    return Library(build(found), "cpu")


@pytest.fixture(scope="session")
def host() -> Library:
    return load("host")


@pytest.fixture(scope="session")
def emulated() -> Library:
    return load("emulated")


@pytest.fixture(params=["cpu", "wave 64", "wave 32"])
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    """Operations use this library: mode CPU, or emulated blocks with waves of 64 or 32."""
    if request.param == "cpu":
        chosen: Library = request.getfixturevalue("host")
    else:
        chosen = request.getfixturevalue("emulated")
        chosen.emulate(int(request.param.split()[1]))
    with use(chosen):
        yield chosen
