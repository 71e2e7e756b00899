"""What is particular to AioClient; what both clients do is in test_client.py."""

import asyncio
import contextlib

import grpc
import pytest

from specserve.router_client.aio_client import AioClient
from specserve.router_client.errors import SpecserveError
from specserve.router_client.retry import RetryPolicy


async def happens(event) -> bool:
    return await asyncio.to_thread(event.wait, 5)


async def collect(stream) -> list[str]:
    return [event.text async for event in stream]


async def test_break_cancels_the_call(fake_server):
    server = fake_server()
    server.hold_after = 1
    async with AioClient(server.target) as client:
        async for event in client.stream("x"):
            assert event.text == "Grüße"
            break
        assert await happens(server.cancelled)


@pytest.mark.parametrize("closing", [False, True])
async def test_contexts_cancel_the_call(fake_server, closing):
    server = fake_server()
    server.hold_after = 1
    async with AioClient(server.target) as client:
        stream = client.stream("x")
        async with contextlib.aclosing(stream) if closing else stream:
            assert (await anext(stream)).text == "Grüße"
        assert await happens(server.cancelled)
        assert await collect(stream) == []


@pytest.mark.parametrize("call", ["stream", "generate"])
async def test_cancelling_the_task_cancels_the_call(fake_server, call):
    server = fake_server()
    server.hold_after = 0
    async with AioClient(server.target) as client:
        task = asyncio.create_task(collect(client.stream("x")) if call == "stream" else client.generate("x"))
        while not server.num_calls:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await happens(server.cancelled)


@pytest.mark.parametrize("call", ["stream", "generate"])
async def test_a_timeout_of_asyncio_is_a_timeout(fake_server, call):
    server = fake_server()
    server.hold_after = 0
    async with AioClient(server.target) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await (collect(client.stream("x")) if call == "stream" else client.generate("x"))
        assert await happens(server.cancelled)


async def test_closing_from_another_task_ends_the_iteration(fake_server):
    server = fake_server()
    server.hold_after = 1
    async with AioClient(server.target) as client:
        stream = client.stream("x")
        task = asyncio.create_task(collect(stream))
        await asyncio.sleep(0.3)
        await stream.aclose()
        assert await asyncio.wait_for(task, 5) == ["Grüße"]
        assert await happens(server.cancelled)


async def test_closing_before_the_first_event(fake_server):
    async with AioClient(fake_server().target) as client:
        stream = client.stream("x")
        await stream.aclose()
        assert await collect(stream) == []


async def test_closing_during_the_wait_for_a_retry(fake_server):
    server = fake_server()
    server.num_unavailable = 100
    async with AioClient(server.target, retry=RetryPolicy(9, 60.0, 60.0)) as client:
        stream = client.stream("x")
        task = asyncio.create_task(collect(stream))
        await asyncio.sleep(0.3)
        await stream.aclose()
        assert await asyncio.wait_for(task, 5) == []
    assert server.num_calls == 1


@pytest.mark.parametrize("call", ["stream", "generate"])
async def test_closing_the_client_is_no_cancellation_of_the_task(fake_server, call):
    server = fake_server()
    server.hold_after = 0
    client = AioClient(server.target)
    task = asyncio.create_task(collect(client.stream("x")) if call == "stream" else client.generate("x"))
    while not server.num_calls:
        await asyncio.sleep(0.01)
    await client.close()
    with pytest.raises(SpecserveError, match="closed") as caught:
        await asyncio.wait_for(task, 5)
    assert caught.value.code is grpc.StatusCode.CANCELLED
    with pytest.raises(ValueError, match="closed"):
        client.stream("x")


def test_made_outside_of_the_loop(fake_server):
    client = AioClient(fake_server().target)

    async def use() -> str:
        async with client:
            return "".join(await collect(client.stream("x")))

    assert asyncio.run(use()) == "Grüße 🤗 an\nalle"


async def test_many_streams_at_once(fake_server):
    server = fake_server()
    async with AioClient(server.target) as client:
        texts = await asyncio.gather(*(collect(client.stream(f"prompt {i}")) for i in range(40)))
    assert {"".join(text) for text in texts} == {"Grüße 🤗 an\nalle"}
    assert {request.text for request in server.requests} == {f"prompt {i}" for i in range(40)}
