"""Compile the stand-in for librccl. It lies with the tests: no wheel has it, so no training can load it by mistake."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parent
ROOT = SOURCES.parents[2]


def build_standin(folder: Path, *flags: str) -> Path:
    """Compile into ``folder/librccl.so.1``; skips the test where there is no C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the stand-in of librccl")
    path = folder / "librccl.so.1"
    sources = map(str, sorted(SOURCES.glob("*.c")))
    options = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O2", "-fPIC", "-shared", "-pthread", *flags]
    command = [compiler, *options, f"-I{ROOT / 'comm'}", "-o", str(path), *sources, "-lrt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return path
