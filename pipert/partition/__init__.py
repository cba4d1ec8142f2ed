"""Cut a model's graph of blocks into stages of equal time, exactly, within memory."""

from __future__ import annotations

from pipert.partition.chain import chain_cuts
from pipert.partition.check import check_stages
from pipert.partition.limits import StageLimit
from pipert.partition.partition import Partition, Skip, Stage
from pipert.partition.solve import partition_graph
from pipert.partition.vocabulary import SpreadVocabulary

__all__ = [
    "Partition",
    "Skip",
    "SpreadVocabulary",
    "Stage",
    "StageLimit",
    "chain_cuts",
    "check_stages",
    "partition_graph",
]
