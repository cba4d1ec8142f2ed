"""What an RCCL transport has in common with all those split from it: library, GPU, and the lanes that are open."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from pipert.comm.rccl_agree import Channel
from pipert.comm.rccl_lanes import Lane
from pipert.comm.rccl_library import Library
from pipert.comm.rccl_pairs import Queues, check_queues, queues_of

#: What a lane is for: messages, a group's collectives, or nothing that a step does (the world, a rank alone).
Use = Literal["messages", "group", "none"]


@dataclass(frozen=True)
class Family:
    """Transports of one library on one GPU.

    Attributes:
        library: what they call.
        device: where their tensors are.
        channel: which messages share a lane.
        lanes: all that are open, and what each is for.
    """

    library: Library
    device: torch.device
    channel: Channel
    lanes: dict[Lane, Use] = field(default_factory=dict)

    def lane(self, place: Any, use: Use) -> Lane:
        """A lane for a communicator whose handle the library puts into ``place``."""
        self.lanes[lane := Lane(self.library, place, self.device)] = use
        return lane

    def check_queues(self, exchange: Callable[[bytes], list[bytes]], messages: int = 0, groups: int = 0) -> None:
        """Refuse so many more lanes than there are, if that is more than the GPU of any rank runs at once. Collective.

        Args:
            exchange: gives every rank everybody's bytes.
            messages: more lanes of messages on this rank.
            groups: more lanes of collectives.

        Raises:
            TransportError: on every rank.
        """
        queues = queues_of(self.device, os.environ, hip=torch.version.hip is not None)
        if queues is None:
            return
        uses = list(self.lanes.values())
        mine = [uses.count("messages") + messages, uses.count("group") + groups, queues.number]
        everybodys = zip(*map(json.loads, exchange(json.dumps(mine).encode())), strict=True)
        messages_of, groups_of, numbers = everybodys
        check_queues(max(messages_of), max(groups_of), Queues(queues.variable, min(numbers)))

    def end(self) -> None:
        """The job has failed: end all operations, or GPUs would wait in them for ever."""
        while self.lanes:
            self.lanes.popitem()[0].close("ncclCommAbort")
