"""Libraries to test: for this CPU, with a GPU's blocks emulated, and for this machine's GPU if it has one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from pipert.hipkernels.build import build
from pipert.hipkernels.errors import KernelTargetError
from pipert.hipkernels.runtime import Library, library_on, use
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


@pytest.fixture(scope="session")
def gpu() -> Library:
    """The library for this machine's GPU; without a compiler for it the tests fail."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPERT_KERNELS", "required")
        found = library_on(torch.device("cuda", torch.cuda.current_device()), torch.float32)
    assert found is not None
    return found


@pytest.fixture(params=["cpu", "wave 64", "wave 32", *(["gpu"] if torch.cuda.is_available() else [])])
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    """Operations use this library: mode CPU, emulated blocks with waves of 64 or 32, or a GPU's.

    On a GPU it is where torch makes tensors.
    """
    if request.param == "gpu":
        chosen = request.getfixturevalue("gpu")
        with torch.device("cuda"), use(chosen):
            yield chosen
        return
    if request.param == "cpu":
        chosen = request.getfixturevalue("host")
    else:
        chosen = request.getfixturevalue("emulated")
        chosen.emulate(int(request.param.split()[1]))
    with use(chosen):
        yield chosen
