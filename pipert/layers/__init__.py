"""Layers whose numbers do not depend on the layout: initial values, dropout, norms."""

from __future__ import annotations

from pipert.layers.dropout import Dropout, Part, name_layers
from pipert.layers.linear import Linear
from pipert.layers.materialise import materialise
from pipert.layers.norm import LayerNorm, RMSNorm

__all__ = ["Dropout", "LayerNorm", "Linear", "Part", "RMSNorm", "materialise", "name_layers"]
