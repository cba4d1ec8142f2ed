"""What this machine offers, found out by trying: `pipert doctor`."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

from pipert.launch import LaunchError, find_launcher, launch

#: Prints the library that mpi4py loads, without starting MPI.
_MPI_VERSION = (
    "import mpi4py; mpi4py.rc.initialize = False\n"
    "from mpi4py import MPI\n"
    "library = MPI.Get_library_version().split('\\n')[0].strip('\\0 ')\n"
    "print(' '.join(library.split()) + ', MPI %d.%d' % MPI.Get_version())"
)
#: Prints each GPU that torch sees.
_GPUS = (
    "import torch\n"
    "print(torch.version.hip and 'HIP ' + torch.version.hip or torch.version.cuda and 'CUDA ' + torch.version.cuda)\n"
    "for i in range(torch.cuda.device_count()):\n"
    "    p = torch.cuda.get_device_properties(i)\n"
    "    print(p.name, getattr(p, 'gcnArchName', ''), f'{p.total_memory / 2**30:.0f} GiB')"
)
#: Prints the library that ``Mesh.from_mpi(tensors="rccl")`` would use.
_RCCL = "import torch\nfrom pipert.comm.rccl_library import Library, find_library\nprint(Library(find_library()))"
_COMPILERS = {
    "g++": "CPU kernels",
    "clang": "kernels for AMD GPUs, with ROCm",
    "hipcc": "kernels for AMD GPUs",
    "nvcc": "kernels for NVIDIA GPUs",
}


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: what was looked at.
        value: what was found.
        ok: True when it works, False when pipert cannot run without it, None when it is merely not there.
        remedy: what to do about it, empty when there is nothing to do.
    """

    name: str
    value: str
    ok: bool | None = True
    remedy: str = ""


def doctor(progress: Callable[[str], None] | None = None, *, message_test: bool = True) -> list[Finding]:
    """Look at everything that pipert needs or can use.

    Args:
        progress: told what is being looked at, before each finding.
        message_test: also pass messages between two ranks (a few seconds).

    Returns:
        The findings; pipert can run if none has ``ok`` False.
    """
    checks: list[tuple[str, Callable[[], list[Finding]]]] = [
        ("Python", _python),
        ("MPI library", _library),
        ("launcher", _launcher),
        ("threads", _threads),
        ("compilers", _compilers),
        ("GPUs", _gpus),
        ("RCCL", _rccl),
        ("Slurm", _slurm),
    ]
    if message_test:
        checks.append(("messages", _messages))
    findings: list[Finding] = []
    for name, check in checks:
        if progress is not None:
            progress(name)
        findings += check()
    return findings


def _python() -> list[Finding]:
    return [Finding("Python", f"{platform.python_version()} with torch {_version('torch')}, numpy {_version('numpy')}")]


def _library() -> list[Finding]:
    code, text = _output([sys.executable, "-c", _MPI_VERSION])
    if code == 0:
        return [Finding("MPI library", f"{text[0]}, mpi4py {_version('mpi4py')}")]
    return [Finding("MPI library", text[-1], False, "pip install 'pipert[mpich]', or load the site's MPI module")]


def _launcher() -> list[Finding]:
    try:
        launcher = find_launcher()
    except LaunchError as error:
        return [Finding("launcher", "none", False, str(error))]
    return [Finding("launcher", f"{launcher.version}: {launcher.path}")]


def _threads() -> list[Finding]:
    usable, total = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    given = os.environ.get("OMP_NUM_THREADS")
    return [Finding("threads", f"{usable} of {total} cores usable, OMP_NUM_THREADS {given or 'shared out by launch'}")]


def _compilers() -> list[Finding]:
    findings = []
    for name, purpose in _COMPILERS.items():
        path = shutil.which(name) or shutil.which(name, path="/opt/rocm/bin:/opt/rocm/llvm/bin:/usr/local/cuda/bin")
        if path is None:
            needed = "install g++ for the fused CPU kernels" if name == "g++" else ""
            findings.append(Finding(name, f"not found ({purpose})", None, needed))
        else:
            _, text = _output([path, "--version"])
            line = next((line for line in text if "release" in line or "version" in line), text[0])
            findings.append(Finding(name, f"{line.strip()}: {path}"))
    return findings


def _gpus() -> list[Finding]:
    code, text = _output([sys.executable, "-c", _GPUS])
    if code != 0:
        return [Finding("GPUs", text[-1], None, "torch cannot be imported; pip install torch")]
    build, *gpus = text
    if build == "None":
        return [Finding("GPUs", "none: this torch is built for CPUs", None)]
    return [Finding("GPUs", f"torch for {build}: {', '.join(gpus) or 'none visible'}", True if gpus else None)]


def _rccl() -> list[Finding]:
    code, text = _output([sys.executable, "-c", _RCCL])
    if code == 0:
        return [Finding("RCCL", text[-1])]
    remedy = text[-1].partition(": ")[2] if os.environ.get("PIPERT_RCCL") else ""
    return [Finding("RCCL", "not found (moves tensors between GPUs)", None, remedy)]


def _slurm() -> list[Finding]:
    if shutil.which("srun") is None:
        return [Finding("Slurm", "not found", None)]
    version, plugins = _output(["srun", "--version"])[1], _output(["srun", "--mpi=list"])[1]
    job = os.environ.get("SLURM_JOB_ID")
    where = f"in job {job}" if job else "outside a job"
    return [Finding("Slurm", f"{version[0]}, {where}; {' '.join(' '.join(plugins).split())}")]


def _messages() -> list[Finding]:
    with tempfile.TemporaryFile() as out:
        lines: list[str] = []
        try:
            code = launch(2, ["-m", "pipert.comm.selftest"], say=lines.append, timeout=90, stdout=out.fileno())
        except LaunchError as error:
            return [Finding("messages", "not tested", False, str(error))]
        out.seek(0)
        text = out.read().decode(errors="replace").strip()
    if code == 0:
        return [Finding("messages", text)]
    return [Finding("messages", f"2 ranks failed, exit code {code}", False, "\n".join(lines[1:]))]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _output(command: list[str]) -> tuple[int, list[str]]:
    """Exit code and lines of a command; one line at least."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, [str(error)]
    return done.returncode, [line for line in (done.stdout + done.stderr).splitlines() if line.strip()] or ["no output"]
