"""Named tensors of all ranks, brought to one of them: to compare, print or save what is spread over a layout."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from pipert.comm.transport import Transport

#: name -> rank -> that rank's tensor
Collected = dict[str, dict[int, torch.Tensor]]


def collect(tensors: Mapping[str, torch.Tensor], transport: Transport, root: int = 0) -> Collected:
    """Bring every rank's tensors to one rank. Every rank calls it.

    Args:
        tensors: this rank's, by name; other ranks may have the same names, with other tensors.
        transport: the ranks.
        root: who gets them.

    Returns:
        on the root everybody's, in host memory; elsewhere nothing.
    """
    mine = [(name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()]
    contents = [json.loads(blob) for blob in transport.exchange(json.dumps(mine).encode())]
    if transport.rank != root:
        for number, tensor in enumerate(tensors.values()):
            tag = number % transport.tag_bound
            request = transport.control.isend(tensor.detach().cpu().contiguous(), root, tag)
            transport.wait(request, "collecting tensors", root)
        return {}
    collected: Collected = {}
    for rank, content in enumerate(contents):
        for number, (name, shape, dtype) in enumerate(content):
            if rank == root:
                tensor = tensors[name].detach().cpu().clone()
            else:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                request = transport.control.irecv(tensor, rank, number % transport.tag_bound)
                transport.wait(request, f"collecting {name}", rank)
            collected.setdefault(name, {})[rank] = tensor
    return collected
