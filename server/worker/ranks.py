"""The ranks of a model as one of them sees them."""

import concurrent.futures
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # not declared

from specserve.models.link import Link
from specserve.models.parallel import TensorParallel
from specserve.models.shared_memory import SharedMemory
from specserve.server.place import RankPlace
from specserve.server.worker.errors import RankError
from specserve.server.worker.monitor import BEAT_S, Monitor

# The monitor knows sooner when something is wrong; a rank may well load for an hour, and be idle for a year.
CONNECTING = timedelta(minutes=15)
PATIENCE = timedelta(days=1000)


@dataclass(slots=True)
class Ranks:
    """What ranks do together outside of steps; alone without a store. `parallel` is that of several after `join`."""

    place: RankPlace | None = None
    monitor: Monitor | None = None
    store: Store | None = None
    parallel: TensorParallel = field(default_factory=TensorParallel)
    _num_gathered: int = 0

    @classmethod
    def connect(cls, place: RankPlace, timeout_s: float) -> "Ranks":
        """Reach the launcher's store, and let this rank be watched."""
        store = TCPStore(
            place.store_host, place.store_port, is_master=place.keeps_store, wait_for_workers=False, timeout=CONNECTING
        )
        store.set_timeout(PATIENCE)
        ranks = cls(place, Monitor(place, timeout_s), store)
        assert ranks.monitor is not None
        ranks.monitor.start(ranks.progress)
        return ranks

    @property
    def rank(self) -> int:
        """Of this process."""
        return 0 if self.place is None else self.place.rank

    def all_gather(self, text: str) -> list[str]:
        """A text of each rank, in their order; all ranks call this equally often."""
        if self.store is None or self.place is None:
            return [text]
        self._num_gathered += 1
        key = f"specserve/gather/{self._num_gathered}"
        self.store.set(f"{key}/{self.place.rank}", text)
        return [self.store.get(f"{key}/{rank}").decode() for rank in range(self.place.size)]

    def join(self, device: torch.device) -> None:
        """Form the groups; returns when all ranks have come."""
        if self.place is None or self.store is None or dist.is_initialized():
            return
        if device.type == "cuda":
            torch.cuda.set_device(device)
        rank, size = self.place.rank, self.place.size
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("specserve/group", self.store),
            rank=rank,
            world_size=size,
            timeout=PATIENCE,
        )
        shared = SharedMemory.join(rank, size, self.all_gather) if device.type == "cpu" else None
        link = Link(rank, dist.new_group(backend="gloo", timeout=PATIENCE))
        self.parallel = TensorParallel(rank, size, dist.group.WORLD, shared, link)

    def progress(self) -> int:
        """Collectives of this rank so far."""
        parallel = self.parallel
        num_sums = 0 if parallel.shared is None else int(parallel.shared.ranks.count)
        return parallel.calls[0] + parallel.link.num_messages + num_sums

    def num_threads(self) -> int:
        """Threads that suit a rank on CPUs: the cores of this machine, shared."""
        local_size = 1 if self.place is None else self.place.local_size
        return max(1, len(os.sched_getaffinity(0)) // local_size)

    @property
    def failure(self) -> "concurrent.futures.Future[RankError] | None":
        """Of any rank; None if this is the only one."""
        return None if self.monitor is None else self.monitor.failure

    def end(self, error: str) -> None:
        """Rank 0 ends, because of an error if there is one; the others end with it."""
        if self.monitor is None or self.place is None:
            return
        if error:
            self.monitor.report(error)
        else:
            self.monitor.end()
        if self.place.keeps_store:
            time.sleep(2 * BEAT_S)  # the others hear of it from this process

    def name(self) -> str:
        """Of this rank, for messages."""
        return f"rank {self.rank} ({socket.gethostname()}, process {os.getpid()})"


def agree(ranks: Ranks, values: dict[str, str], error: Callable[[str], Exception]) -> None:
    """Raise on all ranks if one's values are not those of rank 0, naming both."""
    lines = "\n".join(f"{key}\t{value}" for key, value in values.items())
    everyone = [dict(line.split("\t", 1) for line in text.split("\n")) for text in ranks.all_gather(lines)]
    for rank, other in enumerate(everyone):
        for key, value in everyone[0].items():
            if other.get(key) != value:
                raise error(
                    f"the shards differ: {key} is {value!r} on rank 0 and {other.get(key)!r} on rank {rank}; start all "
                    "of them with the same flags, model files and versions"
                )
