"""Run a script on real MPI ranks in a test, so that no test hangs and no process is left.

result = run_mpi(2, '''
    from pipert.comm.mpi import MpiTransport
    transport = MpiTransport.world()
    print(transport.rank)
''')
assert result.returncode == 0, result.text
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pipert.launch import kill_session

ROOT = Path(__file__).resolve().parent.parent
#: The launcher of the MPI wheel in this environment; "mpiexec" from PATH where there is none.
MPIEXEC = str(found) if (found := Path(sys.executable).with_name("mpiexec")).exists() else "mpiexec"


@dataclass(frozen=True)
class JobResult:
    """What a job left.

    Attributes:
        args: the command.
        returncode: the launcher's exit code.
        stdout: all ranks' standard output, mixed.
        stderr: all ranks' standard error, mixed.
        seconds: how long it ran.
    """

    args: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def text(self) -> str:
        """Everything, for the message of a failed assertion."""
        command = " ".join(self.args)
        return f"{command}\nexit code {self.returncode} after {self.seconds:.1f} s\n{self.stdout}\n{self.stderr}"


class JobTimeout(AssertionError):
    """The job did not end in time. Its whole process group was killed; the message holds its output."""


def run_mpi(
    n: int,
    script: str | Path,
    args: Sequence[str] = (),
    *,
    timeout: float = 120.0,
    deadline: float = 20.0,
    env: Mapping[str, str] | None = None,
    check: bool = False,
    launcher: Sequence[str] | None = None,
) -> JobResult:
    """Run a Python script on ``n`` ranks under ``mpiexec``.

    Args:
        n: how many ranks.
        script: the text of a script (indented as you like), or the path of one.
        args: the script's arguments.
        timeout: seconds after which everything is killed.
        deadline: what `PIPERT_DEADLINE` says to the ranks.
        env: more environment variables.
        check: assert that the exit code is 0.
        launcher: the command up to the script, instead of ``mpiexec -n N python``.

    Raises:
        JobTimeout: the job did not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="pipert-test-") as folder:
        path = Path(script) if isinstance(script, Path) else Path(folder, "script.py")
        if isinstance(script, str):
            path.write_text(textwrap.dedent(script))
        command = [*(launcher or (MPIEXEC, "-n", str(n), sys.executable)), str(path), *args]
        result = run_group(command, timeout, _environment(deadline, env or {}))
    if check:
        assert result.returncode == 0, result.text
    return result


def run_group(command: Sequence[str], timeout: float, environ: Mapping[str, str]) -> JobResult:
    """Run a command in a process group of its own, and kill the whole group at the timeout.

    Raises:
        JobTimeout: the command did not end in time.
    """
    begin = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=dict(environ),
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            kill_session(process.pid)
            process.wait()
        stdout, stderr = _text(out), _text(err)
    result = JobResult(tuple(command), -1 if code is None else code, stdout, stderr, time.monotonic() - begin)
    if code is None:
        raise JobTimeout(f"not over after {timeout} s, killed:\n{result.text}")
    return result


def _text(stream: BinaryIO) -> str:
    stream.seek(0)
    return stream.read().decode(errors="replace")


def _environment(deadline: float, more: Mapping[str, str]) -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PIPERT_", "PMI", "COV_CORE"))}
    environ |= {
        "PIPERT_DEADLINE": str(deadline),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return environ | dict(more)
