"""Names of modules and parameters, as ``nn.Module.named_parameters`` spells them."""

from __future__ import annotations


def join(*parts: str) -> str:
    """Dotted name of the parts that are not empty: ``join("blocks.0", "", "weight")`` is ``"blocks.0.weight"``."""
    return ".".join(part for part in parts if part)
