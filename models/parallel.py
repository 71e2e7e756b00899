"""The tensor-parallel group that layers are built for."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from specserve.models.cpu_kernels import binding as cpu
from specserve.models.link import Link

if TYPE_CHECKING:
    from specserve.models.shared_memory import SharedMemory


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """Rank `rank` of `size`; size 1 needs no process group and its collectives do nothing.

    On CPUs sums go in the order of the ranks, so that they are the same bits on all ranks and for a row in any batch.
    `shared` is there if all ranks are processes of one machine that compute on CPUs. Over `link` rank 0 tells the
    others what to compute. A group of several ranks without a process group only describes shares, for the device meta.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    shared: "SharedMemory | None" = None
    link: Link = field(default_factory=Link)
    calls: list[int] = field(default_factory=lambda: [0])  # collectives over the group so far

    @property
    def can_replay(self) -> bool:
        """Whether sums are calls of a C kernel."""
        return self.size == 1 or self.shared is not None

    def share(self, num_units: int) -> tuple[int, int]:
        """First and number of this rank's of so many units; the first ranks take one more if they don't divide."""
        each, more = divmod(num_units, self.size)
        return self.rank * each + min(self.rank, more), each + (self.rank < more)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place."""
        if self.size == 1 or x.is_meta:
            return x
        if x.device.type != "cpu":
            self.calls[0] += 1
            dist.all_reduce(x, group=self.group)
            return x
        if self.shared is not None and cpu.is_supported(x):
            return cpu.all_reduce(x, self.shared.ranks)
        parts = self._all_gather(x.contiguous())
        for part in parts[1:]:
            parts[0] += part
        return x.copy_(parts[0])

    def all_gather_last_dim(self, x: torch.Tensor) -> torch.Tensor:
        """[n, m] on each rank -> [n, m * size], in rank order."""
        if self.size == 1:
            return x
        if self.shared is not None:
            return cpu.all_gather(x.contiguous(), self.shared.ranks).flatten(1)
        return torch.cat(self._all_gather(x.contiguous()), dim=-1)

    def _all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.calls[0] += 1
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x, group=self.group)
        return parts
