"""The stand-in itself under sanitizers: processes that exchange and sum at random, and check every number."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.comm.standin.build import ROOT, SOURCES
from tests.mpi_harness import run_group


@pytest.mark.parametrize(
    "sanitizers", [["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"], ["-fsanitize=thread"]], ids=str
)
def test_random_groups_and_collectives_are_right_and_clean(sanitizers: list[str], tmp_path: Path) -> None:
    """Races between processes are in other mappings, where the thread sanitizer sees none; numbers would tell."""
    compiler = shutil.which("gcc") or pytest.skip("no C compiler for the stand-in of librccl")
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-O1", "-g", *sanitizers, "-pthread"]
    probe = tmp_path / "probe.c"
    probe.write_text("int main(void) { return 0; }")
    if subprocess.run([compiler, *flags, probe, "-o", tmp_path / "probe"], capture_output=True, check=False).returncode:
        pytest.skip(f"this compiler does not know {sanitizers}")
    sources = [*SOURCES.glob("*.c"), SOURCES / "stress" / "stress.c"]
    program = tmp_path / "stress"
    subprocess.run([compiler, *flags, f"-I{ROOT / 'comm'}", "-o", program, *sources, "-lrt"], check=True)
    for seed in range(3):
        done = run_group([str(program), "150", str(seed)], 60, os.environ)
        assert done.returncode == 0 and "SUMMARY" not in done.stderr, done.text
