"""Doorbells: ranks of one machine wake one another out of a wait.

A rank that sleeps between polls notices a message late, and one that polls all the time takes the core from those that
compute. So each rank has two words in the memory that the ranks of a machine share: one says that it sleeps, the other
is a Linux futex on which it does. Whoever starts a message looks at the first word of the other rank, and rings where
it is set. A sleep has an end in any case, because not everything rings (other machines, the inner steps of a long
message).
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
import time
from collections.abc import Mapping
from typing import Protocol

#: Number of the system call ``futex``, by machine.
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_WAIT, _WAKE = 0, 1
_WORD = 4


class Nap(Protocol):
    """How a waiting rank sleeps."""

    def arm(self) -> int:
        """Say that this rank is about to sleep. What happens from now on cuts the sleep short."""
        ...

    def sleep(self, armed: int, seconds: float) -> None:
        """Sleep so long at most; ``armed`` is what `arm` returned."""
        ...

    def disarm(self) -> None:
        """This rank does not sleep after all, or does no more."""
        ...


class PlainNap:
    """Sleeps that nobody cuts short."""

    def arm(self) -> int:
        """See `Nap`."""
        return 0

    def sleep(self, armed: int, seconds: float) -> None:
        """See `Nap`."""
        time.sleep(seconds)

    def disarm(self) -> None:
        """See `Nap`."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Doorbells:
    """The words of all ranks of a machine, as one of them uses them.

    Args:
        descriptor: of the shared file; it is mapped a second time, for as long as the process lives.
        places: for each rank of the machine the byte, a multiple of 4, at which its two words are: bell and asleep.
        own: this rank.
        nobody: the byte of a word that is always 0: that of a rank which cannot be rung.

    Attributes:
        asleep: the shared memory as words; the word `flag` of a rank is not 0 while it sleeps.
    """

    def __init__(self, descriptor: int, places: Mapping[int, int], own: int, nobody: int) -> None:
        self._memory = mmap.mmap(descriptor, 0)
        self.asleep = memoryview(self._memory).cast("I")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._bells = {rank: place // _WORD for rank, place in places.items()}
        self._own = self._bells[own]
        self._nobody = nobody // _WORD
        self._call = ctypes.CDLL(None).syscall
        self._number = ctypes.c_long(_SYS_FUTEX[platform.machine()])

    @staticmethod
    def supported() -> bool:
        """Whether this machine has futexes that we know how to call."""
        return sys.platform == "linux" and platform.machine() in _SYS_FUTEX

    def flag(self, rank: int) -> int:
        """Index in `asleep` of the word of a rank; for one of another machine, of one that is always 0."""
        bell = self._bells.get(rank)
        return self._nobody if bell is None else bell + 1

    def ring(self, flag: int) -> None:
        """Wake the rank of this flag. Two that ring at once change the word once, which is enough."""
        bell = flag - 1
        self.asleep[bell] = (self.asleep[bell] + 1) & 0xFFFFFFFF
        self._futex(bell, _WAKE, 1, None)

    def arm(self) -> int:
        """See `Nap`."""
        self.asleep[self._own + 1] = 1
        return self.asleep[self._own]

    def sleep(self, armed: int, seconds: float) -> None:
        """See `Nap`. Returns at once if the bell has rung since `arm`."""
        whole, part = divmod(seconds, 1.0)
        self._futex(self._own, _WAIT, armed, ctypes.byref(_Timespec(int(whole), int(part * 1e9))))
        self.disarm()

    def disarm(self) -> None:
        """See `Nap`."""
        self.asleep[self._own + 1] = 0

    def _futex(self, word: int, operation: int, value: int, timeout: object) -> None:
        address = ctypes.c_void_p(self._address + word * _WORD)
        self._call(self._number, address, ctypes.c_int(operation), ctypes.c_uint32(value), timeout, None, 0)
