"""Storms, cancels and floods against a real server: everything comes back, neighbours notice nothing."""

import asyncio
import random
import time

import grpc
import pytest

from specserve.router_client.aio_client import AioClient
from specserve.router_client.errors import SpecserveError

ALLOWED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
}


async def settle(client, seconds=10.0):
    deadline = time.monotonic() + seconds
    while True:
        info = await client.info()
        if not info.running_requests and not info.waiting_requests and info.free_blocks == info.num_blocks:
            return
        assert time.monotonic() < deadline, info
        await asyncio.sleep(0.02)


async def test_cancelled_streams_free_their_blocks_and_leave_neighbours_alone(tiny_address):
    async with AioClient(tiny_address, timeout_s=60) as client:
        options = {"max_new_tokens": 200, "ignore_eos": True}
        alone = await client.generate("neighbour", **options)
        neighbour = asyncio.ensure_future(client.generate("neighbour", **options))
        for index in range(50):
            async with client.stream(f"prompt {index}", max_new_tokens=400, ignore_eos=True) as events:
                for _ in range(index % 4):
                    await anext(events)
        assert (await neighbour).token_ids == alone.token_ids
        await settle(client)


async def test_cancels_at_random_moments_and_then_all_is_well(tiny_address):
    rng = random.Random(0)
    async with AioClient(tiny_address, timeout_s=60) as client:
        expected = await client.generate("probe", max_new_tokens=20)
        semaphore = asyncio.Semaphore(32)

        async def one(index):
            async with semaphore:
                call = client.generate(f"storm {index % 9}", max_new_tokens=60, temperature=1.0)
                task = asyncio.ensure_future(call)
                await asyncio.sleep(rng.random() * 0.05)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

        await asyncio.gather(*(one(index) for index in range(300)))
        await settle(client)
        assert (await client.generate("probe", max_new_tokens=20)).token_ids == expected.token_ids


async def test_a_cancelled_unary_call_is_over_at_once(tiny_address):
    async with AioClient(tiny_address, timeout_s=60) as client:
        calls = [client.generate(f"{n}", max_new_tokens=450, ignore_eos=True) for n in range(4)]
        tasks = [asyncio.ensure_future(call) for call in calls]
        while (await client.info()).running_requests < 4:
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await settle(client, seconds=1.0)


async def test_a_passed_deadline_frees_its_blocks_also_within_the_prefill(tiny_address):
    async with AioClient(tiny_address) as client:
        for timeout_s, prompt_len in ((0.001, 400), (0.01, 400), (0.04, 20)):
            options = {"max_new_tokens": 500 - prompt_len, "ignore_eos": True, "timeout_s": timeout_s}
            with pytest.raises(SpecserveError) as error:
                await client.generate([9] * prompt_len, **options)
            assert error.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
            await settle(client, seconds=1.0)


def random_options(rng):
    options = {
        "max_new_tokens": rng.choice([1, 2, 17, 40]),
        "ignore_eos": rng.random() < 0.5,
        "seed": rng.randrange(99),
    }
    choices = {
        "temperature": [0.0, 0.7, 2.0, -1.0],
        "top_k": [1, 5, 10**6],
        "top_p": [0.1, 0.9, 1.0, 2.0],
        "min_p": [0.0, 0.3],
        "typical_p": [0.2, 0.99],
        "repetition_penalty": [0.8, 1.3],
        "frequency_penalty": [-2.0, 1.0, 3.0],
        "presence_penalty": [0.5],
        "min_new_tokens": [1, 20],
        "stop": [["e"], ["the", "\n"], ["zzzz" * 9]],
        "stop_token_ids": [[5], [10**7]],
        "logprobs": [True],
        "top_n_tokens": [1, 5, 6],
        "prompt_details": [True],
        "truncate": [1, 5],
        "include_stop": [False],
        "skip_special_tokens": [False],
    }
    for name in rng.sample(sorted(choices), rng.randrange(6)):
        options[name] = rng.choice(choices[name])
    return options


async def outcome(client, prompt, options):
    try:
        answer = await client.generate(prompt, **options)
    except SpecserveError as error:
        return error.code
    return answer.token_ids, answer.text


async def test_random_requests_all_end_well_or_with_their_own_error(tiny_address):
    rng = random.Random(1)
    jobs = [("".join(rng.choices("ab é🙂\n日", k=rng.randrange(1, 60))), random_options(rng)) for _ in range(120)]
    async with AioClient(tiny_address, timeout_s=120) as client:
        alone = [await outcome(client, *job) for job in jobs]
        company = await asyncio.gather(*(outcome(client, *job) for job in jobs))
        assert company == alone
        errors = {result for result in alone if isinstance(result, grpc.StatusCode)}
        assert errors == {grpc.StatusCode.INVALID_ARGUMENT} and len([r for r in alone if isinstance(r, tuple)]) > 40
        await settle(client)
        assert (await client.info()).preemptions >= 0


async def test_a_flood_is_refused_with_resource_exhausted_and_the_rest_is_served(start_server, tiny_model):
    flags = ("--model-id", str(tiny_model), "--hostname", "127.0.0.1", "--port", "0", "--num-threads", "1")
    server = start_server(*flags, "--max-batch-size", "2", "--max-concurrent-requests", "5")
    async with AioClient(server.wait_ready(), timeout_s=60) as client:
        results = await asyncio.gather(
            *(outcome(client, f"{n}", {"max_new_tokens": 100, "ignore_eos": True}) for n in range(40))
        )
        served = [result for result in results if isinstance(result, tuple)]
        assert 5 <= len(served) < 40
        assert {r for r in results if not isinstance(r, tuple)} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert all(len(ids) == 100 for ids, _ in served)
        await settle(client)
