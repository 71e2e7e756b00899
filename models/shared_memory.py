"""Memory that the ranks of one machine share, for sums on CPUs without a network stack between them.

It has no name in any file system, so nothing of it can be left behind.
"""

import contextlib
import ctypes
import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path

from specserve.models.cpu_kernels import binding as cpu

SLOT_BYTES = 4 << 20
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

AllGather = Callable[[str], list[str]]


class SharedMemory:
    """`ranks` is what the C kernels take."""

    def __init__(self, memory: mmap.mmap, rank: int, size: int) -> None:
        self._memory = memory
        self._base = ctypes.c_char.from_buffer(memory)
        self.ranks = cpu.SharedRanks(rank, size, SLOT_BYTES, ctypes.addressof(self._base), 0)

    @classmethod
    def join(cls, rank: int, size: int, all_gather: AllGather) -> "SharedMemory | None":
        """All ranks call this; None on all of them unless all are processes of one machine that may share memory.

        all_gather: a text of each rank -> those of all ranks.
        """
        num_bytes = size * (64 + 2 * SLOT_BYTES)
        own = _create(num_bytes) if rank == 0 and cpu.are_built() else None
        offer = {} if own is None else {"machine": _machine(), "path": f"/proc/{os.getpid()}/fd/{own}"}
        first = json.loads(all_gather(json.dumps(offer))[0])
        memory = None
        if first and first["machine"] == _machine() and cpu.are_built():
            with contextlib.suppress(OSError, ValueError):
                descriptor = os.open(first["path"], os.O_RDWR)
                memory = mmap.mmap(descriptor, num_bytes)
                os.close(descriptor)
        is_everywhere = all(answer == "yes" for answer in all_gather("no" if memory is None else "yes"))
        if own is not None:
            os.close(own)
        return cls(memory, rank, size) if memory is not None and is_everywhere else None


def _create(num_bytes: int) -> int | None:
    """A file in memory, zeros; None where there is no such thing."""
    try:
        descriptor = os.memfd_create("specserve")
        os.ftruncate(descriptor, num_bytes)
    except (AttributeError, OSError):
        return None
    return descriptor


def _machine() -> str:
    """The same for processes that see the same /proc."""
    try:
        return f"{_BOOT_ID.read_text().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""
