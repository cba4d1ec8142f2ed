"""The `pipert` command: quick, lazy, and plain about errors."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from pipert import __version__
from pipert.cli import COMMANDS, main
from pipert.comm.errors import MeshError
from pipert.doctor import Finding
from pipert.errors import PartitionError
from pipert.scheduler.errors import ScheduleError


class FakeLaunch(types.ModuleType):
    """Stands in for `pipert.launch` and remembers what it was asked to start."""

    def __init__(self, code: int = 0, error: Exception | None = None) -> None:
        super().__init__("pipert.launch")
        self.code, self.error = code, error
        self.calls: list[tuple[int, list[str]]] = []

    def launch(self, n: int, argv: list[str]) -> int:
        self.calls.append((n, argv))
        if self.error is not None:
            raise self.error
        return self.code


def call(monkeypatch: pytest.MonkeyPatch, *words: str, launcher: FakeLaunch | None = None) -> int:
    """The exit code of `pipert words`, in this process."""
    monkeypatch.setattr(sys, "argv", ["pipert", *words])
    if launcher is not None:
        monkeypatch.setitem(sys.modules, "pipert.launch", launcher)
        monkeypatch.setattr("pipert.launch", launcher, raising=False)
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


def run_fresh(*words: str) -> tuple[int, str, set[str]]:
    """Exit code, output, and imported top-level modules of `pipert words` in a fresh interpreter."""
    code = (
        "import atexit, sys\n"
        "report = lambda: sys.stderr.write('\\n' + ' '.join({n.split('.')[0] for n in sys.modules}))\n"
        "atexit.register(report)\n"
        "from pipert.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)
    *errors, modules = done.stderr.split("\n")
    return done.returncode, done.stdout + "\n".join(errors), set(modules.split())


def test_help_lists_every_command_and_imports_none() -> None:
    code, output, loaded = run_fresh("--help")
    assert code == 0
    assert all(name in output for name in COMMANDS)
    assert not loaded & {"torch", "numba", "networkx", "numpy", "mpi4py", "matplotlib", "pydantic"}


def test_without_words_it_explains_itself() -> None:
    _, output, _ = run_fresh()
    assert "Usage: pipert" in output


def test_version_is_the_package_s(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.strip() == f"pipert {__version__}"


def test_the_schedule_commands_import_no_torch_and_no_mpi() -> None:
    code, output, loaded = run_fresh("schedule", "--help")
    assert code == 0, output
    assert "Usage: pipert schedule" in output
    assert not loaded & {"torch", "mpi4py"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_under_its_own_name(name: str) -> None:
    code, output, loaded = run_fresh(name, "--help")
    assert code == 0, output
    assert f"Usage: pipert {name}" in output
    assert "torch" not in loaded


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(monkeypatch, "lunch") == 2
    assert "No such command 'lunch'" in capsys.readouterr().err


def test_launch_hands_the_script_its_own_options(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = FakeLaunch()
    assert call(monkeypatch, "launch", "-n", "4", "train.py", "-n", "7", "--lr=1", "a b", "--", launcher=launcher) == 0
    assert launcher.calls == [(4, ["train.py", "-n", "7", "--lr=1", "a b", "--"])]


def test_launch_runs_a_module_as_python_does(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = FakeLaunch()
    assert call(monkeypatch, "launch", "-n", "2", "-m", "my.trainer", "--quick", launcher=launcher) == 0
    assert launcher.calls == [(2, ["-m", "my.trainer", "--quick"])]


def test_launch_ends_with_the_job_s_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(monkeypatch, "launch", "-n", "2", "train.py", launcher=FakeLaunch(code=17)) == 17


@pytest.mark.parametrize("words", [("-n", "0", "x.py"), ("-n", "two", "x.py"), ("x.py",), ("-n", "2")])
def test_launch_refuses_what_it_cannot_start(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = FakeLaunch()
    assert call(monkeypatch, "launch", *words, launcher=launcher) == 2
    assert launcher.calls == []


@pytest.mark.parametrize(
    "error",
    [PartitionError("4 layers on 8 stages"), MeshError("pp*tp*dp = 8 but 4 ranks"), ScheduleError("0F0xyz is what?")],
    ids=lambda error: type(error).__name__,
)
def test_our_errors_are_one_message_without_a_traceback(
    error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call(monkeypatch, "launch", "-n", "2", "x.py", launcher=FakeLaunch(error=error)) == 2
    printed = capsys.readouterr()
    assert printed.err == f"{type(error).__name__}: {error}\n"
    assert printed.out == ""


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pipert", "launch", "-n", "2", "x.py"])
    launcher = FakeLaunch(error=KeyError("a fault of ours"))
    monkeypatch.setitem(sys.modules, "pipert.launch", launcher)
    with pytest.raises(KeyError, match="a fault of ours"):
        main()


@pytest.mark.parametrize(("gpu", "mpi", "code"), [(True, True, 0), (None, True, 0), (True, False, 1)])
def test_doctor_shows_each_finding_and_fails_when_something_needed_does(
    gpu: bool | None,
    mpi: bool,
    code: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    findings = [
        Finding("GPUs", "[some/path]", gpu),
        Finding("MPI library", "libmpi.so.12 is missing", mpi, "" if mpi else "pip install 'pipert[mpich]'"),
    ]
    monkeypatch.setattr("pipert.doctor.doctor", lambda progress, message_test: findings)
    assert call(monkeypatch, "doctor") == code
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("GPUs", "[some/path]", "libmpi.so.12 is missing"))
    assert ("FAILS" in printed) == (code != 0)
    assert ("pipert[mpich]" in printed) == (code != 0)
