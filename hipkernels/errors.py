"""Errors of the kernels."""

from __future__ import annotations


class KernelError(Exception):
    """Base of every error that the kernels' package raises on purpose."""


class KernelInputError(KernelError, ValueError):
    """A tensor or an option that no kernel can take; raised before a pointer leaves Python."""


class KernelTargetIndexError(KernelInputError, IndexError):
    """A class that a vocabulary does not have; torch's cross-entropy raises an IndexError."""


class KernelTargetError(KernelError, ValueError):
    """No compiler is known for a target, or the target's name means nothing."""


class KernelBuildError(KernelError, RuntimeError):
    """The library could not be compiled, stored or loaded."""


class KernelLaunchError(KernelError, RuntimeError):
    """A launcher refused its arguments or the device's runtime reported an error."""
