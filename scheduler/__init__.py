"""What runs when: schedules as values, generators, lowering, proof, simulation, drawing. No torch, no MPI, no GPU.

    from pipert.scheduler import MPI, Costs, generate, lower, simulate, verify

    schedule = generate("1f1b", ranks=4, microbatches=8)
    print(verify(lower(schedule, MPI)))
    print(simulate(schedule, Costs(forward=1, backward=2)))

The names below are imported from their modules when they are first used (PEP 562), so importing this package is quick.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipert.scheduler.action import Action, Kind
    from pipert.scheduler.compare import Comparison, compare
    from pipert.scheduler.costs import Costs
    from pipert.scheduler.errors import (
        ActionError,
        CostError,
        DeadlockError,
        FormatError,
        LayoutError,
        ScheduleError,
        SemanticsError,
        TimelineError,
        UnsafeProgramError,
    )
    from pipert.scheduler.formats.text import dump, dumps, load, loads
    from pipert.scheduler.generators.registry import GENERATORS, generate
    from pipert.scheduler.lower import lower
    from pipert.scheduler.lower.delay import delay_backwards
    from pipert.scheduler.placement import Placement
    from pipert.scheduler.program import Program
    from pipert.scheduler.recurrence import simulate_1f1b
    from pipert.scheduler.row import ActionRow
    from pipert.scheduler.schedule import Schedule
    from pipert.scheduler.semantics import (
        GLOO,
        MPI,
        MPI_BUFFERED,
        MPI_SYNCHRONOUS,
        NAMED,
        NCCL_DIRECTION,
        NCCL_GROUPED,
        NCCL_PAIR,
        NCCL_RANK,
        Semantics,
    )
    from pipert.scheduler.simulate import simulate
    from pipert.scheduler.summary import Summary
    from pipert.scheduler.timeline import Timeline
    from pipert.scheduler.trace import chrome_trace
    from pipert.scheduler.verify import Check, Fault, Proof, verify
    from pipert.scheduler.vocabulary import Vocabulary

_NAMES = {
    "action": ("Action", "Kind"),
    "compare": ("Comparison", "compare"),
    "costs": ("Costs",),
    "errors": (
        "ActionError",
        "CostError",
        "DeadlockError",
        "FormatError",
        "LayoutError",
        "ScheduleError",
        "SemanticsError",
        "TimelineError",
        "UnsafeProgramError",
    ),
    "formats.text": ("dump", "dumps", "load", "loads"),
    "generators.registry": ("GENERATORS", "generate"),
    "lower": ("lower",),
    "lower.delay": ("delay_backwards",),
    "placement": ("Placement",),
    "program": ("Program",),
    "recurrence": ("simulate_1f1b",),
    "row": ("ActionRow",),
    "schedule": ("Schedule",),
    "semantics": (
        "GLOO",
        "MPI",
        "MPI_BUFFERED",
        "MPI_SYNCHRONOUS",
        "NAMED",
        "NCCL_DIRECTION",
        "NCCL_GROUPED",
        "NCCL_PAIR",
        "NCCL_RANK",
        "Semantics",
    ),
    "simulate": ("simulate",),
    "summary": ("Summary",),
    "timeline": ("Timeline",),
    "trace": ("chrome_trace",),
    "verify": ("Check", "Fault", "Proof", "verify"),
    "vocabulary": ("Vocabulary",),
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}

__all__ = [
    "GENERATORS",
    "GLOO",
    "MPI",
    "MPI_BUFFERED",
    "MPI_SYNCHRONOUS",
    "NAMED",
    "NCCL_DIRECTION",
    "NCCL_GROUPED",
    "NCCL_PAIR",
    "NCCL_RANK",
    "Action",
    "ActionError",
    "ActionRow",
    "Check",
    "Comparison",
    "CostError",
    "Costs",
    "DeadlockError",
    "Fault",
    "FormatError",
    "Kind",
    "LayoutError",
    "Placement",
    "Program",
    "Proof",
    "Schedule",
    "ScheduleError",
    "Semantics",
    "SemanticsError",
    "Summary",
    "Timeline",
    "TimelineError",
    "UnsafeProgramError",
    "Vocabulary",
    "chrome_trace",
    "compare",
    "delay_backwards",
    "dump",
    "dumps",
    "generate",
    "load",
    "loads",
    "lower",
    "simulate",
    "simulate_1f1b",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its home module the first time it is used."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """`verify` and three more functions are called like their modules: the name is the function's, always.

    Python would bind a module to it as soon as anybody imports that module.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and _HOMES.get(name) == value.__name__:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
