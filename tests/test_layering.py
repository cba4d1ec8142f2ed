"""The contracts of the import linter hold, and would notice if they did not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("importlinter", reason="import-linter is not installed")

ROOT = Path(__file__).parents[1]


def lint_imports(checkout: Path) -> tuple[int, str]:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command(['--no-cache'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the packages that a test may spoil."""
    for folder in ("pipert", "scheduler", "comm", "hipkernels"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    return tmp_path


def test_imports_point_down_without_circles() -> None:
    code, output = lint_imports(ROOT)
    assert code == 0, output


@pytest.mark.parametrize(
    ("importer", "line", "imported"),
    [
        ("scheduler", "import torch", "torch"),
        ("scheduler", "from pipert.comm import errors", "pipert.comm"),
        ("comm", "from pipert.scheduler import errors", "pipert.scheduler"),
        ("comm", "from pipert.errors import PipertError", "pipert.errors"),
        ("hipkernels", "from pipert.cli import lazy", "pipert.cli"),
        ("errors", "from pipert.cli import lazy", "pipert.cli"),
    ],
)
def test_an_import_that_points_up_or_aside_is_noticed(checkout: Path, importer: str, line: str, imported: str) -> None:
    module = checkout / "pipert" / ("errors.py" if importer == "errors" else f"{importer}/spoiled.py")
    with module.open("a") as file:
        file.write(f"\n{line}\n")
    code, output = lint_imports(checkout)
    assert code == 1
    assert f"pipert.{importer} is not allowed to import {imported}" in " ".join(output.split())


def test_a_circle_between_neighbours_is_noticed(checkout: Path) -> None:
    (checkout / "comm" / "one.py").write_text("import pipert.comm.two\n")
    (checkout / "comm" / "two.py").write_text("import pipert.comm.one\n")
    code, output = lint_imports(checkout)
    assert code == 1
    assert ".two -> .one" in output


def test_a_module_without_a_floor_is_noticed(checkout: Path) -> None:
    (checkout / "pipert" / "unplaced.py").write_text("")
    code, output = lint_imports(checkout)
    assert code == 1
    assert "unplaced" in output
