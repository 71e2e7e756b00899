"""One step of the server: schedule, execute on all ranks, take in the result."""

import time
from dataclasses import dataclass
from typing import Protocol

from specserve.server.engine.scheduler import Scheduler
from specserve.server.engine.sequence import Request, SequenceEvent
from specserve.server.engine.step import ScheduledBatch, StepOutput


class Executor(Protocol):
    """Runs a step on the model, wherever that is."""

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """Compute one step; raises if it fails, after which no other step may follow."""
        ...


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The load of the engine at one moment, and its counters since start."""

    block_size: int
    num_blocks: int
    free_blocks: int
    num_running: int
    num_waiting: int
    num_finished: int
    num_generated_tokens: int
    num_preemptions: int
    num_drafts: int
    num_drafted_tokens: int
    accepted_per_position: tuple[int, ...]

    @property
    def num_accepted_tokens(self) -> int:
        """Drafted tokens that became part of an answer."""
        return sum(self.accepted_per_position)


class Engine:
    """Synchronous and single-threaded; AsyncEngine drives it for the server."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self.scheduler = scheduler
        self.executor = executor

    def add(self, request: Request) -> int:
        """Queue a request; the id that its events carry. RequestTooLargeError if it can never fit."""
        return self.scheduler.add(request)

    def abort(self, request_id: int) -> None:
        """Free everything a request holds; no event follows."""
        self.scheduler.abort(request_id)

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work()

    def step(self) -> list[SequenceEvent]:
        """Compute one step; exactly one event of each request is its last."""
        batch = self.scheduler.schedule()
        if batch is None:
            return []
        started = time.perf_counter()
        output = self.executor.execute(batch)
        return self.scheduler.update(batch, output, time.perf_counter() - started)

    def stats(self) -> EngineStats:
        """A snapshot; reading it from another thread is safe."""
        scheduler, blocks = self.scheduler, self.scheduler.block_manager
        return EngineStats(
            block_size=blocks.block_size,
            num_blocks=blocks.num_blocks,
            free_blocks=blocks.num_free_blocks,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_finished=scheduler.num_finished,
            num_generated_tokens=scheduler.num_generated_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_drafts=scheduler.acceptance.num_drafts,
            num_drafted_tokens=scheduler.acceptance.num_drafted_tokens,
            accepted_per_position=tuple(scheduler.acceptance.per_position),
        )
