"""Starts the shards of one machine with torch's elastic agent, and ends when they have ended."""

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from types import FrameType

from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from specserve.server.place import stay_on_this_machine

LOOPBACK = "127.0.0.1"
POLL_S = 0.1
REST_S = 9.0  # after the first shard has ended the others have so long; they end by themselves, unless they are stuck


def run_shards(num_shard: int, arguments: Sequence[str]) -> int:
    """Run `specserve ARGUMENTS` num_shard times; the exit code of rank 0, or 1 if another rank failed alone."""
    stay_on_this_machine()
    logging.disable(logging.CRITICAL)  # the agent's account of what the shards log themselves
    with tempfile.TemporaryDirectory(prefix="specserve-") as folder:
        agent = _agent(num_shard, arguments, folder)
        results: list[RunResult] = []
        thread = threading.Thread(target=lambda: results.append(agent.run()), name="agent", daemon=True)
        with _signals_to_rank_0(agent):
            thread.start()
            _wait(agent, thread)
    return _exit_code(results)


def _agent(num_shard: int, arguments: Sequence[str], folder: str) -> LocalElasticAgent:
    parameters = RendezvousParameters(
        "c10d", f"{LOOPBACK}:0", uuid.uuid4().hex, min_nodes=1, max_nodes=1, local_addr=LOOPBACK
    )
    spec = WorkerSpec(
        role="shard",
        local_world_size=num_shard,
        entrypoint=sys.executable,
        args=("-m", "specserve.server", *arguments),
        rdzv_handler=get_rendezvous_handler(parameters),
        max_restarts=0,
        monitor_interval=POLL_S,
        local_addr=LOOPBACK,
    )
    return LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=folder))


def _pids(agent: LocalElasticAgent) -> list[int]:
    """Of the shards, by rank; empty before they are started."""
    return [int(worker.id) for worker in agent.get_worker_group().workers if worker.id]


@contextlib.contextmanager
def _signals_to_rank_0(agent: LocalElasticAgent) -> Iterator[None]:
    """SIGTERM and SIGINT go to rank 0, which ends the others when it has drained."""

    def forward(number: int, _: FrameType | None) -> None:
        pids = _pids(agent)
        if not pids:
            sys.exit(0)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[0], number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(agent: LocalElasticAgent, thread: threading.Thread) -> None:
    """Until all shards have ended; those that are stuck when others have are killed."""
    first_end: float | None = None
    while thread.is_alive():
        thread.join(POLL_S)
        pids = _pids(agent)
        running = [pid for pid in pids if _is_running(pid)]
        if len(running) < len(pids):
            first_end = first_end or time.monotonic()
            if time.monotonic() - first_end > REST_S:
                for pid in running:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _exit_code(results: Sequence[RunResult]) -> int:
    if not results:
        return 1
    failures = results[0].failures
    if not failures:
        return 0
    rank_0 = failures.get(0)
    return rank_0.exitcode if rank_0 is not None and rank_0.exitcode > 0 else 1
