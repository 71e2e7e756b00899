"""Where this process stands among the shards of a model, as torch's elastic launcher tells it."""

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Rank `rank` of `size`, one of local_size on this machine; the ranks meet at a store that the launcher keeps."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    store_host: str
    store_port: int
    keeps_store: bool = False  # instead of the launcher


def rank_place() -> RankPlace | None:
    """The place of a process that torchrun (or server/launcher.py) started; else None."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    rank, size, local_rank, local_size, port = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    )
    keeps_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return RankPlace(rank, size, local_rank, local_size, os.environ["MASTER_ADDR"], port, keeps_store)


def stay_on_this_machine() -> None:
    """Let the processes that this one starts talk over the loopback interface, unless somebody chose another."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
