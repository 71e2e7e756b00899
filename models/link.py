"""Rank 0's words to the other ranks: arrays of ints, over a group of CPUs, however the tensors travel."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

Ints = NDArray[np.int64]

FIRST_INTS = 128  # of a message; the first is its length, and longer ones take a second broadcast


@dataclass(slots=True)
class Link:
    """One end; without a group there is nobody else. `num_messages` and `num_bytes` count what was sent."""

    rank: int = 0
    group: dist.ProcessGroup | None = None
    num_messages: int = 0
    num_bytes: int = 0

    def share(self, values: Sequence[int] | Ints | None) -> Ints:
        """Rank 0's values, on all ranks; the others give None and wait."""
        own = np.asarray(() if values is None else values, dtype=np.int64)
        if self.group is None:
            return own
        first = np.zeros(FIRST_INTS, dtype=np.int64)
        room = FIRST_INTS - 1
        if self.rank == 0:
            first[0] = len(own)
            first[1 : 1 + len(own)] = own[:room]
        self._broadcast(first)
        length = int(first[0])
        if length <= room:
            return first[1 : 1 + length]
        rest = own[room:].copy() if self.rank == 0 else np.empty(length - room, dtype=np.int64)
        self._broadcast(rest)
        return np.concatenate([first[1:], rest])

    def _broadcast(self, array: Ints) -> None:
        dist.broadcast(torch.from_numpy(array), src=0, group=self.group)
        self.num_messages += 1
        self.num_bytes += array.nbytes
