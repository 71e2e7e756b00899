"""Puts load on a server and records what comes back."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from specserve.router_client.aio_client import AioClient
from specserve.router_client.bench import RequestRecord
from specserve.router_client.errors import SpecserveError
from specserve.router_client.types import GenerateOptions, Prompt

LoadRequest = tuple[Prompt, GenerateOptions]
Progress = Callable[[RequestRecord], Any]


def ignore_progress(record: RequestRecord) -> None:
    """The progress callback that does nothing."""


async def run_request(client: AioClient, request: LoadRequest, *, due_at: float | None = None) -> RequestRecord:
    """Generate once; the record starts at `due_at` (`time.perf_counter()`), or now. A failed call is a record too."""
    prompt, options = request
    record = RequestRecord(time.perf_counter() if due_at is None else due_at)
    try:
        async with client.stream(prompt, **options) as stream:
            async for event in stream:
                if event.token_ids:
                    record.token_events.append((time.perf_counter(), len(event.token_ids)))
                record.summary = event.summary
    except SpecserveError as error:
        record.error = error.code.name
        record.summary = None
    record.ended_at = time.perf_counter()
    return record


async def closed_loop(
    client: AioClient,
    requests: Sequence[LoadRequest],
    concurrency: int,
    progress: Progress = ignore_progress,
) -> list[RequestRecord]:
    """Send all, `concurrency` at a time: the next is sent when one ends. The records are in order of the requests."""
    waiting = iter(enumerate(requests))
    records: dict[int, RequestRecord] = {}

    async def work() -> None:
        for index, request in waiting:
            records[index] = await run_request(client, request)
            progress(records[index])

    await _run_all([work for _ in range(min(concurrency, len(requests)))])
    return [records[index] for index in range(len(requests))]


async def open_loop(
    client: AioClient,
    requests: Sequence[LoadRequest],
    arrivals: Sequence[float],
    progress: Progress = ignore_progress,
) -> list[RequestRecord]:
    """Send each at its arrival (seconds from now), however many still run. The records are in order of the requests."""
    start = time.perf_counter()
    records: dict[int, RequestRecord] = {}

    def worker(index: int) -> Callable[[], Any]:
        async def work() -> None:
            due_at = start + arrivals[index]
            await asyncio.sleep(max(0.0, due_at - time.perf_counter()))
            records[index] = await run_request(client, requests[index], due_at=due_at)
            progress(records[index])

        return work

    await _run_all([worker(index) for index in range(len(requests))])
    return [records[index] for index in range(len(requests))]


async def _run_all(workers: Sequence[Callable[[], Any]]) -> None:
    """Run all; if one fails (a prompt that can't be sent), cancel the others and raise what it raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for worker in workers:
                group.create_task(worker())
    except* ValueError as errors:
        raise errors.exceptions[0] from None
