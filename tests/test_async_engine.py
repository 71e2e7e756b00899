"""The engine thread seen from asyncio: order, limits, aborts, drain, death."""

import asyncio
import contextlib
import threading
import time

import pytest

from specserve.models.block_manager import BlockManager
from specserve.server.engine.async_engine import AsyncEngine
from specserve.server.engine.engine import Engine
from specserve.server.engine.errors import DrainingError, EngineDeadError, QueueFullError, RequestTooLargeError
from specserve.server.engine.scheduler import Scheduler


@pytest.fixture
async def make_engine(table_executor):
    engines = []

    async def make(num_blocks=64, step_seconds=0.0, limit=8, fail_at_step=None):
        scheduler = Scheduler(BlockManager(num_blocks, 4), max_batch_tokens=32, max_batch_size=4)
        executor = table_executor(num_blocks, 4)
        execute = executor.execute

        def slow(batch):
            time.sleep(step_seconds)
            if len(executor.batches) == fail_at_step:
                raise RuntimeError("the device is gone")
            return execute(batch)

        executor.execute = slow
        engine = AsyncEngine(Engine(scheduler, executor), max_concurrent_requests=limit)
        await engine.start()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        await engine.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "engine"]


async def collect(engine, request):
    return [token.token_id async for event in engine.generate(request) for token in event.tokens]


async def until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        await asyncio.sleep(0.002)


async def test_concurrent_requests_get_their_own_answers(make_engine, make_request, table_answer):
    engine = await make_engine()
    prompts = [[n] * (n + 1) for n in range(8)]
    answers = await asyncio.gather(*(collect(engine, make_request(prompt, 10)) for prompt in prompts))
    assert answers == [table_answer(prompt, 10) for prompt in prompts]
    assert engine.num_open_requests == 0 and engine.stats().free_blocks == 64


async def test_one_request_too_many_is_refused_and_the_next_one_is_not(make_engine, make_request):
    engine = await make_engine(step_seconds=0.01, limit=2)
    running = [asyncio.ensure_future(collect(engine, make_request([1], 20))) for _ in range(2)]
    await until(lambda: engine.num_open_requests == 2)
    with pytest.raises(QueueFullError, match="--max-concurrent-requests is 2"):
        await collect(engine, make_request([1], 1))
    await asyncio.gather(*running)
    assert len(await collect(engine, make_request([1], 3))) == 3


async def test_too_large_requests_raise_and_leave_nothing(make_engine, make_request):
    engine = await make_engine(num_blocks=4)
    with pytest.raises(RequestTooLargeError):
        await collect(engine, make_request([1] * 10, 10))
    assert engine.num_open_requests == 0
    assert len(await collect(engine, make_request([1], 3))) == 3


async def test_closing_the_generator_frees_the_blocks_within_a_step(make_engine, make_request, table_answer):
    engine = await make_engine(step_seconds=0.01)
    neighbour = asyncio.ensure_future(collect(engine, make_request([9], 40)))
    async with contextlib.aclosing(engine.generate(make_request([1] * 50, 100))) as events:
        await anext(events)
        assert engine.stats().num_running == 2
    steps = len(engine.engine.executor.batches)
    await until(lambda: engine.stats().num_running == 1)
    assert len(engine.engine.executor.batches) - steps <= 2  # the one in flight, and one of which we hear late
    assert await neighbour == table_answer([9], 40)


async def test_cancelling_the_task_frees_in_any_state(make_engine, make_request):
    engine = await make_engine(step_seconds=0.001, limit=100)
    tasks = [asyncio.ensure_future(collect(engine, make_request([n % 7] * 9, 60))) for n in range(40)]
    for index, task in enumerate(tasks):
        await asyncio.sleep(0.0003 * (index % 5))
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: engine.stats().free_blocks == 64 and not engine.stats().num_waiting)
    assert engine.num_open_requests == 0 and not engine.dead.done()


async def test_drain_lets_streams_finish_and_refuses_new_ones(make_engine, make_request, table_answer):
    engine = await make_engine(step_seconds=0.005)
    running = asyncio.ensure_future(collect(engine, make_request([1], 20)))
    await until(lambda: engine.stats().num_running == 1)
    drained = asyncio.ensure_future(engine.drain(10))
    await asyncio.sleep(0)
    with pytest.raises(DrainingError):
        await collect(engine, make_request([1], 1))
    assert await running == table_answer([1], 20)
    assert await drained is True


async def test_drain_ends_what_outlives_the_timeout(make_engine, make_request):
    engine = await make_engine(step_seconds=0.005)
    running = asyncio.ensure_future(collect(engine, make_request([1], 200)))
    await until(lambda: engine.stats().num_running == 1)
    assert await engine.drain(0.05) is False
    with pytest.raises(DrainingError, match=r"--drain-timeout \(0.05 s\)"):
        await running
    await until(lambda: engine.stats().free_blocks == 64)


async def test_a_failed_step_ends_all_streams_and_kills_the_engine(make_engine, make_request):
    engine = await make_engine(fail_at_step=3)
    results = await asyncio.gather(*(collect(engine, make_request([n], 50)) for n in range(3)), return_exceptions=True)
    assert all(isinstance(result, EngineDeadError) for result in results)
    assert "the device is gone" in str(results[0])
    assert "the device is gone" in str(await engine.dead)
    with pytest.raises(EngineDeadError):
        await collect(engine, make_request([1], 1))


async def test_stop_ends_open_streams(make_engine, make_request):
    engine = await make_engine(step_seconds=0.005)
    running = asyncio.ensure_future(collect(engine, make_request([1], 200)))
    await until(lambda: engine.stats().num_running == 1)
    await engine.stop()
    with pytest.raises(EngineDeadError, match="stopped"):
        await running
