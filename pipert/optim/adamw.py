"""AdamW of pipert's own: fused, on flat shards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipert.errors import ConfigError
from pipert.optim.bucket import Entry
from pipert.optim.rules import AdamW
from pipert.optim.zero import Host, ZeroOptimizer


class ZeroAdamW(ZeroOptimizer):
    """AdamW with `torch.optim.AdamW`'s numbers and defaults, fused, on flat shards; see `ZeroOptimizer`.

        optim = pipert.ZeroAdamW(pipe, zero=1, lr=3e-4, clip=1.0)

    Args:
        pipe: as for `ZeroOptimizer`.
        params: likewise.
        lr: learning rate.
        betas: decay of the running means of gradient and square.
        eps: added to the root of the latter.
        weight_decay: decoupled.
        amsgrad, maximize: torch's; only False.
        zero: the ZeRO stage.
        early: as for `ZeroOptimizer`.
        clip: likewise.

    Raises:
        ConfigError: as `ZeroOptimizer`; or a hyper-parameter is out of range.
    """

    def __init__(
        self,
        pipe: Host,
        params: Iterable[Any] | None = None,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        zero: int = 0,
        early: bool = False,
        clip: float | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self._refused = {"amsgrad": amsgrad, "maximize": maximize}
        self._start(pipe, AdamW, params, defaults, zero, early, clip)

    def prepare(self, entries: Sequence[Entry]) -> None:
        """Check the arguments and lay out the buffers."""
        for name, wanted in self._refused.items():
            if wanted:
                raise ConfigError(f"{name} = {wanted!r} is not in ZeroAdamW; use ZeroOptimizer with torch.optim.AdamW")
        _check_hyper(self._given_defaults)
        super().prepare(entries)
        for group in self.param_groups:
            _check_hyper(group)


def _check_hyper(group: Mapping[str, Any]) -> None:
    """`torch.optim.AdamW`'s ranges."""
    betas = group["betas"]
    if not (isinstance(betas, Sequence) and all(isinstance(beta, (int, float)) for beta in betas)):
        raise ConfigError(f"betas = {betas!r} must be two numbers in [0, 1)")
    for name in ("lr", "eps", "weight_decay"):
        if not (isinstance(group[name], (int, float)) and group[name] >= 0 and math.isfinite(group[name])):
            raise ConfigError(f"{name} = {group[name]!r} must be a number >= 0")
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ConfigError(f"betas = {betas!r} must be two numbers in [0, 1)")
