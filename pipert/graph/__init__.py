"""A model as a graph of blocks: trace it, measure or estimate its costs, build the module of a stage."""

from __future__ import annotations

from pipert.graph.estimate import estimate
from pipert.graph.model_graph import INPUT, OUTPUT, Block, Edge, ModelGraph, ParameterSpec, TensorSpec, TiedGroup
from pipert.graph.profile import BlockCost, profile
from pipert.graph.stage import StageBlock, StageModule, TracedModel, stage_module
from pipert.graph.trace import trace

__all__ = [
    "INPUT",
    "OUTPUT",
    "Block",
    "BlockCost",
    "Edge",
    "ModelGraph",
    "ParameterSpec",
    "StageBlock",
    "StageModule",
    "TensorSpec",
    "TiedGroup",
    "TracedModel",
    "estimate",
    "profile",
    "stage_module",
    "trace",
]
