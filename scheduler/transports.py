"""Transports as people name them on a command line: a library, and what of it shares a queue."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches

from pipert.scheduler.errors import LayoutError
from pipert.scheduler.semantics import NAMED, NCCL_GROUPED, NCCL_PAIR, Channel, Semantics

#: What shares a communicator, and so a queue: ``none`` gives each message its own.
GROUPS: dict[str, Channel] = {"pair": "pair", "direction": "direction", "rank": "rank", "none": "message"}

#: Libraries whose usual rules have another name in `NAMED`.
LIBRARIES: dict[str, Semantics] = {"nccl": NCCL_PAIR, "rccl": replace(NCCL_GROUPED, name="rccl-pair")}


def transport(name: str, group: str | None = None) -> Semantics:
    """The message rules of a transport.

    Args:
        name: one of `semantics.NAMED`; or ``nccl``, a communicator for each pair of ranks; or ``rccl``, the same with
            exchanges in groups, as pipert's own transport over RCCL does it.
        group: one of `GROUPS` in place of what the transport has: the messages that share a communicator.

    Raises:
        LayoutError: no transport or group is called that.
    """
    known = {**NAMED, **LIBRARIES}
    if name not in known:
        near = get_close_matches(name.lower(), known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise LayoutError(f"no transport is called {name!r}; {hint}there are {', '.join(known)}")
    if group is None:
        return known[name]
    if group not in GROUPS:
        raise LayoutError(f"no group is called {group!r}; there are {', '.join(GROUPS)}")
    library = known[name].name.removesuffix(f"-{known[name].channel}")
    # The two messages of an exchange need no group where they share no queue.
    grouped = known[name].grouped and group in ("pair", "rank")
    return replace(known[name], name=f"{library}-{group}", channel=GROUPS[group], grouped=grouped)
