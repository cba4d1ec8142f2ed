"""The runtime's errors: every refusal names the values, the rule and the remedy."""

from __future__ import annotations


class PipertError(Exception):
    """Base of every error that pipert's runtime raises on purpose."""


class ConfigError(PipertError, ValueError):
    """A configuration or an argument cannot be used."""


class GraphError(PipertError, ValueError):
    """A model cannot be turned into a graph of blocks."""


class PartitionError(PipertError, ValueError):
    """A model cannot be cut into the stages asked for."""


class BatchError(PipertError, ValueError):
    """A batch cannot be split into micro-batches, or the ranks were given different batches."""


class BoundaryError(PipertError, RuntimeError):
    """A value cannot cross a stage boundary."""


class DataError(PipertError, ValueError):
    """A corpus, token file or data position cannot be used."""


class EndOfData(PipertError):  # like StopIteration, it is no fault
    """The data iterator given to a step has no further batch; raised on every rank."""
