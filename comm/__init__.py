"""Who talks to whom: transports, mesh, groups, waiting, watchdog.

The names below are imported from their modules when they are first used (PEP 562): importing this package loads no
torch and starts no MPI.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipert.comm.errors import (
        CommError,
        HangError,
        JobAborted,
        MeshError,
        MessageError,
        OptionError,
        TransportError,
    )
    from pipert.comm.faults import Faults
    from pipert.comm.local import current_transport, run_ranks
    from pipert.comm.mesh import Mesh
    from pipert.comm.mesh_shape import Coordinates
    from pipert.comm.transport import Request, Transport
    from pipert.comm.wait import WaitPolicy

_NAMES = {
    "errors": (
        "CommError",
        "HangError",
        "JobAborted",
        "MeshError",
        "MessageError",
        "OptionError",
        "TransportError",
    ),
    "faults": ("Faults",),
    "local": ("current_transport", "run_ranks"),
    "mesh": ("Mesh",),
    "mesh_shape": ("Coordinates",),
    "transport": ("Request", "Transport"),
    "wait": ("WaitPolicy",),
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}

__all__ = [
    "CommError",
    "Coordinates",
    "Faults",
    "HangError",
    "JobAborted",
    "Mesh",
    "MeshError",
    "MessageError",
    "OptionError",
    "Request",
    "Transport",
    "TransportError",
    "WaitPolicy",
    "current_transport",
    "run_ranks",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its home module the first time it is used."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
