"""Errors of the transports and meshes."""

from __future__ import annotations


class CommError(Exception):
    """Base of every error that the communication package raises on purpose."""


class MeshError(CommError, ValueError):
    """The mesh asked for does not fit the ranks there are."""


class MessageError(CommError, ValueError):
    """A message cannot be sent or received as asked (memory layout, rank, tag, dtype)."""


class TransportError(CommError, RuntimeError):
    """The transport failed or is not available."""


class HangError(CommError, TimeoutError):
    """A wait outlasted its deadline, or can never end (a deadlock)."""


class JobAborted(CommError, RuntimeError):
    """Another rank failed first; the message carries that first cause."""


class OptionError(CommError, ValueError):
    """An option of a transport has a value it cannot have."""
