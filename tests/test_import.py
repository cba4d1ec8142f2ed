"""Importing is quick and does nothing: no torch, no MPI, no compiler, no device."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from types import ModuleType

import pytest

HEAVY = {"torch", "mpi4py", "numba", "networkx", "matplotlib", "pydantic", "numpy"}


def modules_after(code: str) -> set[str]:
    """Top-level names in ``sys.modules`` after a fresh interpreter ran the code."""
    report = "; import sys, json; sys.stderr.write(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.splitlines()[-1]))


def test_importing_pipert_loads_nothing_heavy() -> None:
    assert not modules_after("import pipert; pipert.__version__; dir(pipert)") & HEAVY


def test_importing_the_command_loads_nothing_heavy() -> None:
    assert not modules_after("import pipert.cli") & HEAVY


def test_the_scheduler_needs_no_torch_and_no_mpi() -> None:
    walk = (
        "import pkgutil, importlib, pipert.scheduler as s\n"
        "for m in pkgutil.walk_packages(s.__path__, 'pipert.scheduler.'): importlib.import_module(m.name)\n"
        "0"
    )
    loaded = modules_after(walk)
    assert "pipert" in loaded
    assert not loaded & {"torch", "mpi4py"}


def test_importing_every_module_starts_no_mpi_and_compiles_nothing() -> None:
    walk = (
        "import pkgutil, importlib, sys, pipert\n"
        "for m in pkgutil.walk_packages(pipert.__path__, 'pipert.'):\n"
        "    if not m.name.endswith('__main__'): importlib.import_module(m.name)\n"
        "assert 'mpi4py.MPI' not in sys.modules, 'MPI was started'\n"
        "torch = sys.modules.get('torch')\n"
        "assert torch is None or not torch.cuda.is_initialized(), 'a GPU was touched'\n"
        "assert torch is None or not torch.distributed.is_initialized()\n"
        "0"
    )
    assert "pipert" in modules_after(walk)


LAZY = [import_module(name) for name in ("pipert", "pipert.scheduler", "pipert.comm")]


@pytest.mark.parametrize(("package", "name"), [(package, name) for package in LAZY for name in package.__all__])
def test_every_public_name_has_a_home(package: ModuleType, name: str) -> None:
    assert getattr(package, name) is not None
    assert not isinstance(getattr(package, name), ModuleType)
    assert name in dir(package)


@pytest.mark.parametrize("package", LAZY)
def test_a_name_that_does_not_exist_is_an_attribute_error(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'Pipelin'"):
        package.Pipelin  # noqa: B018


@pytest.mark.parametrize("first", ["", "from pipert.scheduler.{0} import {0}; ", "import pipert.scheduler.{0}; "])
def test_a_function_called_like_its_module_is_the_function_whatever_was_imported_first(first: str) -> None:
    names = ("compare", "lower", "simulate", "verify")
    use = "from pipert.scheduler import {0} as f; assert callable(f) and f.__name__ == '{0}'; "
    modules_after("".join((first + use).format(name) for name in names) + "0")


def test_the_three_packages_have_one_import_name_each() -> None:
    import pipert.comm
    import pipert.hipkernels
    import pipert.scheduler

    assert pipert.comm.__name__ == "pipert.comm"
    loaded = modules_after("import pipert.comm, pipert.scheduler, pipert.hipkernels; dir(pipert.comm)")
    assert not HEAVY & loaded
    assert not {"comm", "scheduler", "hipkernels"} & loaded
