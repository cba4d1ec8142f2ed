"""Parameter groups: which weights decay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


def decay_groups(parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for a torch optimizer: matrices and embeddings decay, vectors (norms and biases) do not.

    The rule looks at the shape only, so a rank's groups do not depend on which other parameters it has.

    Args:
        parameters: (name, parameter), for example `pipert.Pipeline.named_parameters`; frozen ones are left out.
        weight_decay: of the first group.

    Returns:
        both groups, with the names of their parameters; one may be empty.
    """
    trainable = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    groups = []
    for decays in (True, False):
        members = [(name, parameter) for name, parameter in trainable if (parameter.dim() >= 2) is decays]
        groups.append(
            {
                "params": [parameter for _, parameter in members],
                "names": [name for name, _ in members],
                "weight_decay": weight_decay if decays else 0.0,
            }
        )
    return groups
