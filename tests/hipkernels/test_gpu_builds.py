"""The same sources compile for AMD and NVIDIA GPUs without a warning, into code that fits its registers.

They run where there are compilers that take about a minute: clang 19 or newer with its lld or a site's hipcc, and nvcc.
PIPERT_GPU_BUILDS=0 leaves them out; PIPERT_GPU_BUILDS=1 tries Debian's hipcc too, which takes many minutes.
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
    pytest.mark.skipif(os.environ.get("PIPERT_GPU_BUILDS") == "0", reason="PIPERT_GPU_BUILDS=0"),
    pytest.mark.timeout(3600),
    pytest.mark.slow,
]
ARCHITECTURES = "gfx90a,gfx942"


def library(name: str) -> Path:
    """The target's library; the test is skipped where it has no compiler, or only one that takes too long."""
    try:
        target = find_target(name)
    except KernelTargetError as error:
        pytest.skip(str(error))
    if target.compiler == "/usr/bin/hipcc" and os.environ.get("PIPERT_GPU_BUILDS") != "1":
        pytest.skip("Debian's hipcc takes many minutes; install clang-19 and lld-19, or set PIPERT_GPU_BUILDS=1")
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


def test_amd_code_has_waves_of_64_and_spills_no_register(tmp_path: Path) -> None:
    objects = code_objects(library(ARCHITECTURES), tmp_path)
    readelf, kernels = tool("llvm-readelf"), dict.fromkeys(ARCHITECTURES.split(","), 0)
    for name, file in objects.items():
        notes = subprocess.run([readelf, "--notes", str(file)], capture_output=True, text=True, check=True).stdout
        values = {
            key: re.findall(rf"\.{key}:\s+(\d+)", notes)
            for key in ("wavefront_size", "vgpr_spill_count", "private_segment_fixed_size")
        }
        assert set(values["wavefront_size"]) <= {"64"}, name
        assert set(values["vgpr_spill_count"]) <= {"0"}, name
        assert set(values["private_segment_fixed_size"]) <= {"0"}, name
        kernels[name.split(".")[0]] += len(values["wavefront_size"])
    assert min(kernels.values()) >= 60, kernels  # and no other architecture than those asked for


def test_amd_libraries_leave_the_hip_runtime_to_torch() -> None:
    path = library(ARCHITECTURES)
    needed = subprocess.run([tool("readelf"), "-d", str(path)], capture_output=True, text=True, check=True).stdout
    assert "amdhip" not in needed


def test_nvidia_code_is_there_for_the_architecture_asked_for() -> None:
    path = library("sm_90")
    assert b"sm_90" in path.read_bytes()


def test_prototypes_need_no_preprocessor_beyond_numbers() -> None:
    directives = [line for line in (SOURCES / "kernels.h").read_text().splitlines() if line.startswith("#")]
    assert all(re.fullmatch(r"#define PIPERT_\w+ \d+", line) for line in directives)
