"""What all tests share: one thread a process, warnings of compilers are errors, and hypothesis profiles."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Before torch or numba is imported, here and in the processes that tests start: two tests at a time share two cores.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ[variable] = "1"

# Sources of kernels compile without a warning.
os.environ["PIPERT_KERNEL_WARNINGS"] = "error"

# Ranks start by the hundred: each would compile every source file again where the byte code is not kept.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Timings on shared machines say nothing about an example, so there is no deadline for one; pytest-timeout ends hangs.
settings.register_profile("dev", deadline=None, print_blob=True)
settings.register_profile(
    "ci", parent=settings.get_profile("dev"), derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", parent=settings.get_profile("dev"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))
