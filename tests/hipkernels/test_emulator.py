"""The emulator finds what it promises to: races, dependence on the size of a wave, barriers that some threads miss."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import pipert.hipkernels as hk
from pipert.hipkernels.build import SOURCES, build
from pipert.hipkernels.errors import KernelBuildError, KernelLaunchError, KernelTargetError
from pipert.hipkernels.reference.dropout import kept
from pipert.hipkernels.runtime import Library, use
from pipert.hipkernels.targets import Target, find_target
from tests.hipkernels.check import assert_close, double, leaf, randn


def check_norm(library: Library) -> None:
    for rows, columns in ((7, 330), (11, 65)):
        x, weight, bias = leaf(randn(rows, columns)), leaf(randn(columns)), leaf(randn(columns, seed=1))
        y = hk.layer_norm(x, weight, bias)
        y.backward(dy := randn(rows, columns, seed=2))
        x64, weight64, bias64 = double(x), double(weight), double(bias)
        y64 = F.layer_norm(x64, (columns,), weight64, bias64)
        y64.backward(dy.double())
        for ours, theirs in ((y, y64), (x.grad, x64.grad), (weight.grad, weight64.grad), (bias.grad, bias64.grad)):
            assert_close(ours, theirs, 16.0)


def check_sums(library: Library) -> None:
    """Sums land in the middle of memory whose rest must stay as it is."""
    rows, columns = 7, 330
    x, dy, weight = randn(rows, columns), randn(rows, columns, seed=2), torch.ones(columns)
    memory, workspace = torch.full((4, columns), 7.0), torch.empty(3, 2, columns)
    mean, rstd = x.mean(-1), torch.ones(rows)
    inputs = (3, dy, None, x, weight, mean, rstd, rows, columns, True, 0)
    library.run("norm_backward", torch.empty_like(x), memory[1:3], workspace, *inputs)
    assert (memory[[0, 3]] == 7.0).all()
    assert_close(memory[2], dy.double().sum(0), 8.0)


def check_softmax(library: Library) -> None:
    x = randn(9, 40)
    out = torch.ones(9, 40, dtype=torch.bool).triu(32)
    expected = x.double().masked_fill(out, -torch.inf).softmax(-1)
    assert_close(hk.masked_softmax(x, causal=True), expected)
    memory = torch.zeros(361)[1:].view(9, 40).copy_(x)  # no address here is a multiple of 16 bytes
    assert_close(hk.masked_softmax(memory, causal=True), expected)


def check_cross_entropy(library: Library) -> None:
    logits, targets = leaf(3 * randn(5, 3000)), torch.tensor([0, 2999, 7, 1500, 64])
    losses = hk.cross_entropy(logits, targets)
    losses.sum().backward()
    logits64 = double(logits)
    losses64 = F.cross_entropy(logits64, targets, reduction="none")
    losses64.sum().backward()
    assert_close(losses, losses64, 8.0)
    assert_close(logits.grad, logits64.grad)


def check_dropout(library: Library) -> None:
    keys = torch.tensor([3, 4])
    for columns, offset in ((64, 4), (63, 1)):
        y = hk.bias_dropout_add(torch.ones(2, 3, columns), p=0.5, keys=keys, offset=offset)
        assert torch.equal(y != 0, kept(keys, 3 * columns, offset, 2**31).reshape(y.shape))


def check_optimizer(library: Library) -> None:
    for size in (1, 255, 4097):
        memory = torch.full((size + 2,), 7.0)
        hk.scale_cast(torch.ones(size), out=memory[1:-1], factor=2.0)
        assert (memory[[0, -1]] == 7.0).all()
        assert (memory[1:-1] == 2.0).all()
        x = randn(size)
        torch.testing.assert_close(hk.squared_norm([x]), (x.double() ** 2).sum(), rtol=1e-12, atol=0)


@dataclass(frozen=True)
class Mutant:
    """A mistake: in a file, this text becomes that; found by a check of the kernels of ``unit``."""

    name: str
    file: str
    old: str
    new: str
    unit: str
    check: Callable[[Library], None]


_FIRST_BARRIER = "  PORT_BARRIER();\n  if (PORT_THREAD % PORT_WAVE == 0)"
_SECOND_BARRIER = "= x;\n  PORT_BARRIER();\n  x = parts[0]"
_LARGEST = (
    "  for (int64_t i = begin + PORT_THREAD * V; i < end; i += PORT_THREADS * V) {\n    const float x = f(i);\n    most"
)
_LAST = "(PORT_BLOCK + 1) * each);\n  for"
_WRITER = "    if (PORT_THREAD == 0) {\n"
_ANEW = "if (!(lost < 8.0f * squares))"
_WAVES = "wave < PORT_THREADS / PORT_WAVE"
_HERE = "PORT_THREAD == target / V % PORT_THREADS"
MUTANTS = [
    Mutant("no first barrier", "block.h", _FIRST_BARRIER, _FIRST_BARRIER.split("\n")[1], "norm", check_norm),
    Mutant("no second barrier", "block.h", _SECOND_BARRIER, "= x;\n  x = parts[0]", "norm", check_norm),
    Mutant("waves of 32 assumed", "block.h", "mask = PORT_WAVE / 2", "mask = 16", "norm", check_norm),
    Mutant("waves of 64 assumed", "block.h", "mask = PORT_WAVE / 2", "mask = 32", "norm", check_norm),
    Mutant("waves miscounted", "block.h", _WAVES, "wave < PORT_THREADS / 32", "norm", check_norm),
    Mutant("a wave forgotten", "block.h", _WAVES, "wave < 2", "norm", check_norm),
    Mutant("no barrier in column sums", "columns.h", "  PORT_BARRIER();\n", "", "norm", check_norm),
    Mutant("column sums write too far", "columns.h", "group == 0 && c < width", "group == 0", "norm", check_sums),
    Mutant(
        "a group's part forgotten",
        "columns.h",
        "other = 1; other < groups",
        "other = 1; other < groups - 1",
        "norm",
        check_norm,
    ),
    Mutant("the last row forgotten", "norm.hip", _LAST, _LAST.replace("each);", "each - 1);"), "norm", check_norm),
    Mutant("the pivot forgotten", "norm.hip", "mean = pivot + shift", "mean = shift", "norm", check_norm),
    Mutant("a barrier for one thread", "norm.hip", _WRITER, _WRITER + "PORT_BARRIER();\n", "norm", check_norm),
    Mutant("a reduction by half a wave", "norm.hip", _ANEW, "if (PORT_THREAD % 2)", "norm", check_norm),
    Mutant(
        "causal mask off by one",
        "softmax.hip",
        "query + columns - mask.queries + 1",
        "query + columns - mask.queries",
        "softmax",
        check_softmax,
    ),
    Mutant(
        "addresses of packs not looked at",
        "values.h",
        "(uintptr_t)p % 16 == 0",
        "(uintptr_t)p % 1 == 0",
        "softmax",
        check_softmax,
    ),
    Mutant(
        "sums not rescaled",
        "cross_entropy.hip",
        "    raise_to(seen, most);\n",
        "",
        "cross_entropy",
        check_cross_entropy,
    ),
    Mutant(
        "target given to another thread",
        "cross_entropy.hip",
        _HERE,
        "PORT_THREAD == 0",
        "cross_entropy",
        check_cross_entropy,
    ),
    Mutant(
        "word of the wrong element",
        "philox.h",
        "const uint32_t part = (uint32_t)element % 4",
        "const uint32_t part = 0",
        "dropout",
        check_dropout,
    ),
    Mutant(
        "elements past the end",
        "values.h",
        _LARGEST,
        _LARGEST.replace("i < end", "i <= end"),
        "optimizer",
        check_optimizer,
    ),
]


def spoiled(folder: Path, mutant: Mutant | None, units: tuple[str, ...]) -> Path:
    """A copy of the sources with these units and the mistake."""
    shutil.copytree(
        SOURCES, folder, ignore=lambda _, names: [n for n in names if n.endswith(".hip") and n[:-4] not in units]
    )
    if mutant is not None:
        text = (folder / mutant.file).read_text()
        assert mutant.old in text, f"{mutant.file} has changed: the mutant {mutant.name!r} is no longer one"
        (folder / mutant.file).write_text(text.replace(mutant.old, mutant.new))
    return folder


def run_all(library: Library, check: Callable[[Library], None]) -> None:
    """The check with every size of wave and order of threads; raises what it finds."""
    with use(library):
        for wave, threads, order in ((64, 256, 0), (64, 128, 1), (32, 256, 2), (32, 64, 0), (64, 64, 2), (32, 128, 1)):
            library.emulate(wave, threads, order)
            check(library)


@pytest.mark.parametrize(
    "check", [check_norm, check_sums, check_softmax, check_cross_entropy, check_dropout, check_optimizer]
)
def test_right_kernels_pass_with_every_wave_block_and_order(
    emulated: Library, check: Callable[[Library], None]
) -> None:
    run_all(emulated, check)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_mistakes_are_found(emulated: Library, tmp_path: Path, mutant: Mutant) -> None:
    sources = spoiled(tmp_path / "csrc", mutant, ("library", mutant.unit))
    try:
        library = Library(build(replace(find_target("emulated"), name="mutant"), sources=sources), "cpu")
    except KernelBuildError as error:
        pytest.fail(f"the mutant does not compile: {error}")
    with pytest.raises((AssertionError, KernelLaunchError)) as found:
        run_all(library, mutant.check)
    if mutant.name == "a barrier for one thread":
        assert "norm.hip:" in str(found.value)
        assert "divergent barrier" in str(found.value)
    if mutant.name == "addresses of packs not looked at":
        assert "misaligned pack" in str(found.value)
    if mutant.name == "a reduction by half a wave":
        assert "block.h:" in str(found.value)
        assert "incomplete shuffle" in str(found.value)


def race_checker() -> Target:
    """The emulator under ThreadSanitizer, linked into a program."""
    try:
        target = find_target("emulated")
    except KernelTargetError as error:
        pytest.skip(str(error))
    probe = subprocess.run(
        [target.compiler, "-x", "c++", "-fsanitize=thread", "-", "-o", "/dev/null"],
        input="int main() {}", text=True, capture_output=True, check=False,
    )  # fmt: skip
    if probe.returncode:
        pytest.skip(f"{target.compiler} has no ThreadSanitizer")
    flags = (*target.compile, "-fsanitize=thread", "-g")
    return replace(target, name="races", compile=flags, link=("-fsanitize=thread",))


def races(tmp_path: Path, mutant: Mutant | None, units: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run the program of ``races.cpp``."""
    target = race_checker()
    sources = spoiled(tmp_path / "csrc", mutant, ("library", *units))
    shutil.copy(Path(__file__).parent / "races.cpp", sources / "races.hip")
    program = [str(build(target, sources=sources))]
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    if shutil.which("setarch"):  # ThreadSanitizer wants memory where it expects it
        program = ["setarch", "-R", *program]
    done = subprocess.run(program, capture_output=True, text=True, timeout=250, check=False, env=environment)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not run under this kernel's address space randomisation")
    return done


def test_no_two_threads_of_a_block_race(tmp_path: Path) -> None:
    done = races(tmp_path, None, ("norm", "activation", "optimizer", "dropout", "softmax", "cross_entropy"))
    assert done.returncode == 0, done.stderr[-6000:]
    assert "WARNING: ThreadSanitizer" not in done.stderr


@pytest.mark.parametrize("name", ["no first barrier", "no barrier in column sums"])
def test_races_are_reported_even_when_the_numbers_are_right(tmp_path: Path, name: str) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    done = races(tmp_path, mutant, ("norm",))
    assert "WARNING: ThreadSanitizer: data race" in done.stderr, done.stderr[-3000:]


@pytest.fixture(autouse=True)
def _settings_for_the_next_test(emulated: Library) -> Iterator[None]:
    yield
    emulated.emulate(64)
