"""Building and finding libraries, and what happens when that is impossible."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import pipert.hipkernels as hk
from pipert.hipkernels import runtime
from pipert.hipkernels.__main__ import main
from pipert.hipkernels.build import SOURCES, build, library_path
from pipert.hipkernels.errors import KernelBuildError, KernelInputError, KernelTargetError
from pipert.hipkernels.runtime import Library, library_for
from pipert.hipkernels.targets import Target, find_target

#: A compiler that takes its time and leaves a mark for every file it compiled.
SLOW = """#!/bin/sh
case "$*" in *--version*) echo slow 1.0; exit 0;; esac
while [ $# -gt 1 ]; do [ "$1" = -o ] && out=$2; shift; done
sleep 0.2
echo "$out" >> "$MARKS"
echo library > "$out"
"""


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    compiler = tmp_path / "slow-compiler"
    compiler.write_text(SLOW)
    compiler.chmod(0o755)
    monkeypatch.setenv("MARKS", str(tmp_path / "marks"))
    return Target("slow", str(compiler), ("-c",), str(compiler))


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "one.hip").write_text("int one;")
    return folder


@pytest.fixture(autouse=True)
def _forget_loaded_libraries() -> None:
    runtime._load.cache_clear()


def marks(tmp_path: Path) -> int:
    path = tmp_path / "marks"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_a_library_is_built_once_and_again_when_anything_changes(slow: Target, sources: Path, tmp_path: Path) -> None:
    first = build(slow, tmp_path / "cache", sources)
    assert build(slow, tmp_path / "cache", sources) == first
    assert marks(tmp_path) == 2  # one source and the link
    (sources / "one.h").write_text("#define ONE 1")
    second = build(slow, tmp_path / "cache", sources)
    assert second != first
    flags = Target("slow", slow.compiler, ("-c", "-O1"), slow.linker)
    assert library_path(flags, tmp_path / "cache", sources) not in (first, second)
    assert not list((tmp_path / "cache").glob("*building*"))


def test_of_many_builders_one_builds(slow: Target, sources: Path, tmp_path: Path) -> None:
    threads = [threading.Thread(target=build, args=(slow, tmp_path / "cache", sources)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert marks(tmp_path) == 2


def test_a_killed_build_and_a_stale_lock_are_no_obstacle(slow: Target, sources: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    path = library_path(slow, cache, sources)
    process = multiprocessing.get_context("fork").Process(target=build, args=(slow, cache, sources))
    process.start()
    while not list(cache.glob(f"{path.stem}.building-*")):
        time.sleep(0.01)
    process.kill()
    process.join()
    assert not path.exists()
    assert path.with_suffix(".lock").exists()
    assert build(slow, cache, sources, patience=5.0) == path
    assert path.read_text() == "library\n"
    assert not list(cache.glob("*building*"))


def test_a_builder_that_never_ends_is_not_waited_for_forever(slow: Target, sources: Path, tmp_path: Path) -> None:
    import fcntl

    path = library_path(slow, tmp_path, sources)
    with path.with_suffix(".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(KernelBuildError, match="another process has been building"):
            build(slow, tmp_path, sources, patience=0.2)


def test_a_failing_compiler_is_quoted(sources: Path, tmp_path: Path) -> None:
    (sources / "one.hip").write_text("int one = two;")
    with pytest.raises(KernelBuildError, match="two"):
        build(find_target("host"), tmp_path / "cache", sources)


def test_a_compilers_warning_costs_nobody_the_kernels_but_fails_these_tests(
    slow: Target, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Path(slow.compiler)
    compiler.write_text(SLOW.replace("sleep 0.2", "echo 'one.hip:1: warning: old-fashioned' >&2"))
    with pytest.raises(KernelBuildError, match="old-fashioned"):
        build(slow, tmp_path / "cache", sources)
    monkeypatch.delenv("PIPERT_KERNEL_WARNINGS")
    assert build(slow, tmp_path / "cache", sources).exists()


def test_a_library_that_is_there_needs_no_folder_that_can_be_written(
    slow: Target, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build(slow, tmp_path / "cache", sources)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert build(slow, tmp_path / "cache", sources) == path
    with pytest.raises(KernelBuildError, match="Read-only file system; set PIPERT_CACHE"):
        build(slow, tmp_path / "other", sources)


def test_a_user_without_a_home_is_told_to_name_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for variable in ("PIPERT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(KernelBuildError, match=r"no folder for the kernels: .*set PIPERT_CACHE"):
        build(find_target("host"))
    assert library_for(torch.ones(1)) is None


def test_a_cache_that_cannot_be_written_leads_to_the_reference_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PIPERT_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("PIPERT_KERNELS", "auto")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            torch.testing.assert_close(hk.layer_norm(torch.ones(2, 4)), torch.zeros(2, 4))
    assert len(caplog.records) == 1
    assert "using torch instead" in caplog.text
    monkeypatch.setenv("PIPERT_KERNELS", "required")
    with pytest.raises(KernelBuildError, match="PIPERT_KERNELS=required"):
        hk.layer_norm(torch.ones(2, 4))


def test_no_compiler_leads_to_the_reference_or_to_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING):
        assert library_for(torch.ones(1)) is None
    assert "no compiler for kernels on 'host'" in caplog.text
    monkeypatch.setenv("PIPERT_KERNELS", "required")
    with pytest.raises(KernelBuildError, match="no compiler"):
        library_for(torch.ones(1))


@pytest.mark.parametrize("variable", ["PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID", "RANK"])
def test_of_all_ranks_the_first_one_says_that_there_are_no_kernels(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    for rank, lines in (("3", 0), ("0", 1)):
        runtime._load.cache_clear()
        monkeypatch.setenv(variable, rank)
        assert library_for(torch.ones(1)) is None
        assert sum(record.levelno >= logging.WARNING for record in caplog.records) == lines


def test_the_environment_turns_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPERT_KERNELS", "reference")
    assert library_for(torch.ones(1)) is None
    monkeypatch.setenv("PIPERT_KERNELS", "sometimes")
    with pytest.raises(KernelInputError, match="auto, reference, required"):
        library_for(torch.ones(1))


def test_other_devices_and_dtypes_are_the_references() -> None:
    assert library_for(torch.ones(1, dtype=torch.float64)) is None
    assert library_for(torch.ones(1, device="meta")) is None


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "library.so").write_text("no library")
    with pytest.raises(KernelBuildError, match="cannot be loaded"):
        Library(tmp_path / "library.so", "cpu")


@pytest.mark.parametrize("name", ["", "cuda", "gfx90a,sm_90", "gfx90a,,gfx942", "sm90"])
def test_unknown_targets_are_refused(name: str) -> None:
    with pytest.raises(KernelTargetError, match="is none of"):
        find_target(name)


def test_the_command_prints_the_path_or_the_error(
    tmp_path: Path, host: Library, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["build", "--target", "host"]) == 0
    assert capsys.readouterr().out.strip() == str(host.path)
    assert main(["path", "--target", "nonsense"]) == 1
    assert "KernelTargetError" in capsys.readouterr().err


def test_importing_compiles_and_loads_nothing(tmp_path: Path) -> None:
    code = (
        "import pkgutil, importlib, sys, pipert.hipkernels as h\n"
        "assert 'torch' not in sys.modules\n"
        "for m in pkgutil.walk_packages(h.__path__, 'pipert.hipkernels.'):\n"
        "    if not m.name.endswith('__main__'): importlib.import_module(m.name)\n"
        "assert '_cffi_backend' not in sys.modules\n"
    )
    environment = {**os.environ, "PIPERT_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "cache").exists()


def test_the_library_uses_torchs_openmp_and_its_prototypes_are_all_defined(host: Library) -> None:
    names = [line.split("(")[0].split()[-1].lstrip("*") for line in (SOURCES / "kernels.h").read_text().splitlines()
             if line.startswith(("int ", "int64_t ", "const char "))]  # fmt: skip
    assert len(names) > 15
    for name in names:
        assert hasattr(host._functions, name), name
    if shutil.which("readelf"):
        needed = subprocess.run(["readelf", "-d", str(host.path)], capture_output=True, text=True, check=True).stdout
        assert "libgomp" not in needed
