"""What all ranks must have in common before RCCL's first communicator is made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from pipert.comm.errors import TransportError
from pipert.comm.rccl_library import Library, find_library
from pipert.comm.rccl_streams import device_of
from pipert.comm.transport import Transport

Channel = Literal["pair", "direction"]

#: What the verifier is told. ``pipert schedule check --transport rccl --group pair`` judges by the same rules.
SEMANTICS: Mapping[Channel, Mapping[str, object]] = {
    "pair": {"name": "rccl-pair", "matching": "order", "channel": "pair", "grouped": True},
    "direction": {"name": "rccl-direction", "matching": "order", "channel": "direction"},
}


def agree(control: Transport, channel: Channel) -> tuple[Library, torch.device, bytes]:
    """Load the library everywhere, or nowhere; rank 0 gives the id of the first communicator.

    Raises:
        TransportError: on every rank.
    """
    library = device = None
    answer: dict[str, Any] = {"channel": channel}
    try:
        library = Library(find_library())
        device = device_of(library)
        answer["version"] = library.version
        answer["id"] = library.unique_id().hex() if control.rank == 0 else ""
    except TransportError as error:
        answer["error"] = str(error)
    answers = [json.loads(blob) for blob in control.exchange(json.dumps(answer).encode())]
    for rank, other in enumerate(answers):
        if "error" in other:
            raise TransportError(f"rank {rank}: {other['error']}" if control.size > 1 else other["error"])
    check_same([json.dumps([a["channel"], a["version"]]).encode() for a in answers], "has channel and version")
    assert library is not None and device is not None
    return library, device, bytes.fromhex(answers[0]["id"])


def check_same(answers: Sequence[bytes], what: str) -> None:
    """Refuse answers of the ranks that differ; ``what`` is the verb before them.

    Raises:
        TransportError: on every rank.
    """
    for rank, answer in enumerate(answers):
        if answer != answers[0]:
            raise TransportError(
                f"rank 0 {what} {answers[0].decode()}, rank {rank} {answer.decode()}; they must be the same everywhere"
            )
