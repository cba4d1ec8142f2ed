"""Layers whose numbers do not depend on the layout: initial values, dropout, norms, activations.

They compute with `pipert.hipkernels` where those are usable, else with torch's own functions.
"""

from __future__ import annotations

from pipert.layers.activation import gelu, swiglu
from pipert.layers.dropout import Dropout, name_layers
from pipert.layers.linear import Linear
from pipert.layers.materialise import materialise
from pipert.layers.norm import LayerNorm, RMSNorm

__all__ = ["Dropout", "LayerNorm", "Linear", "RMSNorm", "gelu", "materialise", "name_layers", "swiglu"]
