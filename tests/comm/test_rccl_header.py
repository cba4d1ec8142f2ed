"""The prototypes that cffi reads are those of a real ``nccl.h`` or ``rccl.h``; where none is installed, not checked."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from pipert.comm.rccl_library import HEADER


def includes() -> tuple[str, list[str]]:
    """The header's name, and the compiler's flags for it and for its GPU runtime's headers."""
    package = find_spec("nvidia.nccl") if find_spec("nvidia") else None
    wheel = Path(package.submodule_search_locations[0]) / "include" if package else Path("/none")
    cuda = next((path for path in Path("/usr/local").glob("cuda*/include") if (path / "cuda_runtime.h").exists()), None)
    if (wheel / "nccl.h").exists() and cuda:
        return "nccl.h", [f"-I{wheel}", f"-I{cuda}"]
    for rocm in (Path("/opt/rocm/include"), Path("/usr/include")):
        if (rocm / "rccl" / "rccl.h").exists():
            return "rccl/rccl.h", ["-D__HIP_PLATFORM_AMD__", f"-I{rocm}"]
    pytest.skip("neither nccl.h with CUDA's headers (pip install nvidia-nccl-cu13) nor rccl.h is installed")


def test_prototypes_numbers_and_layouts_are_those_of_the_real_header(tmp_path: Path) -> None:
    name, flags = includes()
    compiler = shutil.which("gcc") or pytest.skip("no C compiler")
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    stream = "hipStream_t stream" if "rccl" in name else "cudaStream_t stream"
    lines = [f"#include <{name}>", "#include <stddef.h>"]
    lines += [
        f"{result} (*pointer_{function})({arguments.replace('void *stream', stream)}) = {function};"
        for result, function, arguments in re.findall(r"(ncclResult_t|const char \*)\s*(nccl\w+)\(([^)]*)\);", text)
    ]
    for names in re.findall(r"typedef enum \{(.*?)\}", text, flags=re.DOTALL):
        # Newer than the oldest version that pipert takes, and only looked up by number.
        known = [each.strip() for each in names.split(",") if each.strip() != "ncclTimeout"]
        lines += [f'_Static_assert({each} == {number}, "{each}");' for number, each in enumerate(known)]
    lines.append("struct oldest { size_t size; unsigned int magic, version; int blocking; };")
    lines += [
        f'_Static_assert(offsetof(struct oldest, {field}) == offsetof(ncclConfig_t, {field}), "{field}");'
        for field in ("size", "magic", "version", "blocking")
    ]
    lines.append('_Static_assert(sizeof(ncclUniqueId) == 128 && NCCL_SPLIT_NOCOLOR == -1, "sizes");')
    source = tmp_path / "header.c"
    source.write_text("\n".join(lines))
    done = subprocess.run([compiler, "-std=c11", "-Wall", "-Werror", "-fsyntax-only", *flags, str(source)],
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sum("pointer_" in line for line in lines) >= 19
