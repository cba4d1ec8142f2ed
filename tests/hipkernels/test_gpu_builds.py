"""The same sources compile for AMD and NVIDIA GPUs without a warning, into code that fits its registers.

A whole library takes an AMD compiler several minutes, so these run on request only: PIPERT_GPU_BUILDS=1.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pipert.hipkernels.build import SOURCES, build
from pipert.hipkernels.errors import KernelTargetError
from pipert.hipkernels.targets import find_target

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("PIPERT_GPU_BUILDS", "") in ("", "0"),
        reason="compiling for GPUs takes minutes; PIPERT_GPU_BUILDS=1 runs these",
    ),
    pytest.mark.timeout(3600),
]


def library(name: str) -> Path:
    """The target's library; the test is skipped where it has no compiler."""
    try:
        target = find_target(name)
    except KernelTargetError as error:
        pytest.skip(str(error))
    return build(target)


def tool(*names: str) -> str:
    for name in names:
        for path in (shutil.which(name), f"/usr/lib/llvm-19/bin/{name}", f"/usr/lib/llvm-15/bin/{name}"):
            if path and Path(path).exists():
                return path
    pytest.skip(f"none of these is installed: {', '.join(names)}")


def code_objects(path: Path, folder: Path) -> dict[str, Path]:
    """AMD code objects in a library, by architecture and number: bundles of ELF files, found by their entries."""
    data = path.read_bytes()
    found = {}
    for count, match in enumerate(re.finditer(rb"__CLANG_OFFLOAD_BUNDLE__", data)):
        start, at = match.start(), match.end()
        entries, at = int.from_bytes(data[at : at + 8], "little"), at + 8
        for _ in range(entries):
            offset, size, length = (int.from_bytes(data[at + 8 * k : at + 8 * k + 8], "little") for k in range(3))
            name = data[at + 24 : at + 24 + length].decode()
            at += 24 + length
            if "amdgcn" in name and size:
                architecture = name.rsplit("-", 1)[-1]
                output = folder / f"{architecture}.{count}.elf"
                output.write_bytes(data[start + offset : start + offset + size])
                found[f"{architecture}.{count}"] = output
    return found


@pytest.mark.slow
@pytest.mark.parametrize("architectures", ["gfx90a", "gfx90a,gfx942"])
def test_amd_code_has_waves_of_64_and_spills_no_register(architectures: str, tmp_path: Path) -> None:
    path = library(architectures)
    readelf = tool("llvm-readelf")
    objects = code_objects(path, tmp_path)
    assert {name.split(".")[0] for name in objects} == set(architectures.split(","))
    kernels = 0
    for name, file in objects.items():
        notes = subprocess.run([readelf, "--notes", str(file)], capture_output=True, text=True, check=True).stdout
        for kernel in re.split(r"\n\s*- \.a(?:gpr_count|rgs)", notes)[1:]:
            values = dict(re.findall(r"\.(\w+):\s+(\d+)\s", kernel))
            if "wavefront_size" not in values:
                continue
            kernels += 1
            assert values["wavefront_size"] == "64", name
            assert values.get("vgpr_spill_count", "0") == "0", (name, kernel[:500])
            assert values["private_segment_fixed_size"] == "0", (name, kernel[:500])
    assert kernels >= 60 * len(architectures.split(","))


@pytest.mark.slow
def test_amd_libraries_leave_the_hip_runtime_to_torch() -> None:
    path = library("gfx90a")
    needed = subprocess.run([tool("readelf"), "-d", str(path)], capture_output=True, text=True, check=True).stdout
    assert "amdhip" not in needed


@pytest.mark.slow
def test_nvidia_code_is_there_for_the_architecture_asked_for() -> None:
    path = library("sm_90")
    assert b"sm_90" in path.read_bytes()


def test_prototypes_need_no_preprocessor_beyond_numbers() -> None:
    directives = [line for line in (SOURCES / "kernels.h").read_text().splitlines() if line.startswith("#")]
    assert all(re.fullmatch(r"#define PIPERT_\w+ \d+", line) for line in directives)
