"""The service over real gRPC on loopback ports, with a scripted engine behind it."""

import asyncio
import dataclasses
import time

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from specserve.proto import specserve_pb2 as pb
from specserve.server.engine.errors import NonFiniteLogitsError

MIB = 2**20
OK = grpc.StatusCode.OK
INVALID_ARGUMENT = grpc.StatusCode.INVALID_ARGUMENT
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.fixture
async def server(server_helpers):
    async with server_helpers.running() as running:
        yield running


async def failure(call) -> tuple[grpc.StatusCode, str]:
    """Code and details of a unary call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


async def rest(call) -> list:
    """The events of a stream that are still to come."""
    events = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


async def stream_failure(call) -> tuple[int, grpc.StatusCode]:
    """How many events a stream brought before it failed, and its code."""
    num_events = 0
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while await call.read() is not grpc.aio.EOF:
            num_events += 1
    return num_events, caught.value.code()


async def until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.005)


def prompt(text="the é", **fields) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, **fields)


async def test_joined_stream_is_the_unary_answer(server, server_helpers):
    for options in (
        pb.StoppingParameters(),
        pb.StoppingParameters(stop=[" an a"]),
        pb.StoppingParameters(stop=[" an a"], include_stop=False),
        pb.StoppingParameters(max_new_tokens=9),  # in the middle of 🤗
        pb.StoppingParameters(max_new_tokens=1),
    ):
        request = prompt(
            stopping=options, sampling=pb.SamplingParameters(seed=5), response=pb.ResponseOptions(logprobs=True)
        )
        events = [event async for event in server.stub.GenerateStream(request)]
        answer = await server.stub.Generate(request)
        assert "".join(event.text for event in events) == answer.text
        assert [i for event in events for i in event.token_ids] == list(answer.token_ids)
        assert [d for event in events for d in event.details] == list(answer.details)
        assert events[-1].summary == answer.summary
        assert [event.HasField("summary") for event in events] == [False] * (len(events) - 1) + [True]
        counts = [event.generated_tokens for event in events]
        assert counts == [sum(len(e.token_ids) for e in events[: n + 1]) for n in range(len(events))]
        assert answer.summary.generated_tokens == len(answer.token_ids) == counts[-1]
    assert (await server.stub.Generate(prompt())).text == server_helpers.TEXT


async def test_summary(server):
    answer = await server.stub.Generate(prompt(sampling=pb.SamplingParameters(seed=2**64 - 1)))
    assert answer.summary == pb.GenerationSummary(
        finish_reason=pb.FINISH_REASON_EOS_TOKEN,
        prompt_tokens=6,
        generated_tokens=27,
        seed=2**64 - 1,
        queue_seconds=0.25,
        prefill_seconds=0.5,
        decode_seconds=1.5,
        drafted_tokens=8,
        accepted_tokens=6,
        num_drafts=4,
        accepted_per_position=[4, 2],
        mean_acceptance_length=2.5,
        cached_prompt_tokens=3,
    )
    answer = await server.stub.Generate(prompt(stopping=pb.StoppingParameters(stop=["🤗", "ß"])))
    assert answer.summary.finish_reason == pb.FINISH_REASON_STOP_STRING
    assert answer.summary.stop_string == "ß" and not answer.summary.HasField("stop_token_id")
    answer = await server.stub.Generate(prompt(stopping=pb.StoppingParameters(stop_token_ids=[265])))
    assert answer.summary.finish_reason == pb.FINISH_REASON_STOP_TOKEN
    assert answer.summary.stop_token_id == 265 and answer.text == "Gr"
    answer = await server.stub.Generate(prompt(stopping=pb.StoppingParameters(max_new_tokens=3)))
    assert answer.summary.finish_reason == pb.FINISH_REASON_LENGTH


async def test_details(server):
    options = pb.ResponseOptions(logprobs=True, top_n_tokens=2, prompt_details=True)
    events = [event async for event in server.stub.GenerateStream(prompt(response=options))]
    assert [len(event.details) for event in events] == [len(event.token_ids) for event in events]
    first = events[0].details[0]
    assert (first.id, first.text, first.logprob, first.rank, first.special) == (74, "G", -0.5, 1, False)
    assert [(top.id, top.text, top.logprob) for top in first.top] == [(74, "G", -0.5), (5, "\x02", -3.0)]
    assert events[-1].details[-1].special  # EOS
    assert [len(event.prompt) for event in events] == [6] + [0] * (len(events) - 1)
    bos, *_, last = events[0].prompt
    assert (bos.id, bos.text, bos.special, bos.HasField("logprob")) == (1, "<s>", True, False)
    assert (last.id, last.text, last.logprob, last.HasField("rank")) == (172, "\ufffd", -1.0, False)
    bare = [event async for event in server.stub.GenerateStream(prompt())]
    assert not any(event.details or event.prompt for event in bare)


async def test_tokenize(server):
    answer = await server.stub.Tokenize(pb.TokenizeRequest(text="the é"))
    assert list(answer.token_ids) == [1, 266, 269, 259, 198, 172]
    assert list(answer.tokens) == ["<s>", "t", "he", " ", "\ufffd", "\ufffd"]
    await server.stub.Generate(prompt())
    assert server.engine.requests[-1].prompt_token_ids == list(answer.token_ids)


async def test_info(server):
    info = await server.stub.Info(pb.InfoRequest())
    assert (info.model_id, info.revision, info.model_type) == ("fake", "main", "llama")
    assert (info.dtype, info.device, info.attention_backend, info.num_shard) == ("float32", "cpu", "torch", 1)
    assert (info.vocab_size, list(info.eos_token_ids), info.has_chat_template) == (320, [2, 400], True)
    assert (info.max_input_tokens, info.max_total_tokens) == (64, 96)
    assert (info.max_batch_tokens, info.max_batch_size, info.max_concurrent_requests) == (32, 4, 8)
    assert (info.max_stop_sequences, info.max_top_n_tokens) == (4, 5)
    assert (info.block_size, info.num_blocks, info.free_blocks) == (4, 24, 24)
    assert (info.finished_requests, info.generated_tokens, info.preemptions) == (7, 70, 1)
    counts = {"drafted_tokens": 30, "accepted_tokens": 20, "num_drafts": 10, "accepted_per_position": [9, 7, 4]}
    assert info.speculator == pb.SpeculatorInfo(type="none", mean_acceptance_length=3.0, **counts)
    assert info.version and 0 < info.uptime_seconds < 60


async def test_wrong_requests_have_their_status(server):
    cases = {
        b"\x0a\x02\xff\xfe": (INVALID_ARGUMENT, "text is not valid UTF-8"),
        b"\xff": (INVALID_ARGUMENT, "is no specserve.v1.GenerateRequest message"),
        b"": (INVALID_ARGUMENT, "input is not set"),
        b"\x78\x01": (grpc.StatusCode.UNIMPLEMENTED, "field number 15"),
        prompt(adapter_id="a").SerializeToString(): (grpc.StatusCode.UNIMPLEMENTED, "adapter_id"),
        prompt(sampling=pb.SamplingParameters(top_p=2)).SerializeToString(): (INVALID_ARGUMENT, "sampling.top_p is 2"),
    }
    for data, (code, text) in cases.items():
        got, details = await failure(server.raw("Generate", data))
        assert (got, text in details) == (code, True), details
        stream = server.channel.unary_stream("/specserve.v1.TextGeneration/GenerateStream")(data, timeout=20)
        assert await stream_failure(stream) == (0, code)
    assert (await failure(server.raw("Tokenize", b"\x0a\x02\xff\xfe")))[0] == INVALID_ARGUMENT
    assert (await failure(server.raw("Info", b"\x78\x01")))[0] == grpc.StatusCode.UNIMPLEMENTED
    assert (await failure(server.raw("Nope", b"")))[0] == grpc.StatusCode.UNIMPLEMENTED
    assert server.engine.requests == []
    assert (await server.stub.Generate(prompt())).text


async def test_long_and_non_ascii_details_arrive(server):
    role = "Rôle\n🤗" * 100_000
    request = pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role=role, content="a")]))
    code, details = await failure(server.stub.Generate(request))
    assert code == INVALID_ARGUMENT
    assert details.startswith("chat.messages[0].role is 'Rôle") and details.endswith("system, user, assistant, tool")
    assert len(details) < 1100


@pytest.mark.parametrize(
    ("num_bytes", "code"),
    [
        (3 * MIB, INVALID_ARGUMENT),
        (5 * MIB, INVALID_ARGUMENT),
        (16 * MIB - 100, INVALID_ARGUMENT),
        (16 * MIB + 100, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (17 * MIB, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
async def test_message_sizes(server, num_bytes, code):
    got, details = await failure(server.stub.Generate(prompt("x" * num_bytes), timeout=20))
    assert got == code, details
    assert (await server.stub.Generate(prompt())).text


async def test_message_limit_is_configurable(server_helpers):
    listen = dataclasses.replace(server_helpers.CONFIG.server, max_message_bytes=2048)
    async with server_helpers.running(dataclasses.replace(server_helpers.CONFIG, server=listen)) as server:
        assert (await failure(server.stub.Generate(prompt("x" * 1500))))[0] == INVALID_ARGUMENT
        assert (await failure(server.stub.Generate(prompt("x" * 3000))))[0] == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_large_answers_leave_the_server(server):
    answer = await server.stub.Tokenize(pb.TokenizeRequest(text="é" * 400_000))
    assert len(answer.token_ids) == 800_001
    assert answer.ByteSize() > 5 * MIB


async def test_other_streams_go_on_while_a_long_prompt_is_tokenized(server):
    longest, last = 0.0, time.perf_counter()
    long = asyncio.ensure_future(server.stub.Tokenize(pb.TokenizeRequest(text="the é" * 100_000)))
    server.engine.step_s = 0.001
    num_answers = 0
    while not long.done():
        await server.stub.Generate(prompt())
        num_answers += 1
        longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
    assert num_answers >= 3, f"the slowest of {num_answers} answers took {longest:.2f} s"


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
@pytest.mark.parametrize("hold_at", [0, 3])
@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_cancelled_calls_free_their_request(server, method, hold_at, how):
    server.engine.hold_at = hold_at
    timeout = 0.3 if how == "deadline" else 20
    call = getattr(server.stub, method)(prompt(), timeout=timeout)
    if method == "GenerateStream":
        for _ in range(hold_at):
            await call.read()
    await until(lambda: server.engine.num_open == 1)
    if how == "cancel":
        call.cancel()
    else:
        failed = failure(call) if method == "Generate" else stream_failure(call)
        assert grpc.StatusCode.DEADLINE_EXCEEDED in await failed
    await until(lambda: server.engine.num_open == 0, 1.0)
    server.engine.hold_at = None
    assert (await server.stub.Generate(prompt())).text


async def test_a_client_that_hangs_up_frees_its_request(server):
    server.engine.hold_at = 2
    channel = grpc.aio.insecure_channel(server.server.address)
    call = channel.unary_stream("/specserve.v1.TextGeneration/GenerateStream")(prompt().SerializeToString())
    await call.read()
    assert server.engine.num_open == 1
    await channel.close()
    await until(lambda: server.engine.num_open == 0, 1.0)


@pytest.mark.parametrize("method", ["cancel", "close"])
async def test_a_client_that_does_not_read_frees_its_request(server_helpers, method):
    """The handler waits for room to write then, not for the engine."""
    async with server_helpers.running(max_total_tokens=10**6) as server:
        server.engine.tokens = server.engine.tokens[:-1] * 20_000
        server.engine.others *= 1000
        options = pb.ResponseOptions(logprobs=True, top_n_tokens=2)
        stopping = pb.StoppingParameters(max_new_tokens=500_000)
        channel = grpc.aio.insecure_channel(server.server.address)
        stream = channel.unary_stream("/specserve.v1.TextGeneration/GenerateStream")
        call = stream(prompt(response=options, stopping=stopping).SerializeToString())
        await call.read()
        num_events = 0
        while num_events != server.engine.num_events:
            num_events = server.engine.num_events
            await asyncio.sleep(0.2)
        assert server.engine.num_open == 1
        if method == "cancel":
            call.cancel()
        else:
            await channel.close()
        await until(lambda: server.engine.num_open == 0, 1.0)
        await channel.close()


async def test_200_cancelled_calls_leave_nothing_behind(server):
    server.engine.hold_at = 1
    num_tasks = len(asyncio.all_tasks())
    for index in range(200):
        call = server.stub.GenerateStream(prompt(f"the {index}"))
        if index % 3:
            await call.read()
        call.cancel()
    server.engine.hold_at = None
    await until(lambda: server.engine.num_open == 0)
    answer = await server.stub.Generate(prompt(), timeout=2)
    assert answer.summary.generated_tokens == 27
    await until(lambda: len(asyncio.all_tasks()) <= num_tasks + 5)


async def test_full_queue(server):
    server.engine.hold_at = 0
    calls = [server.stub.Generate(prompt(f"the {index}")) for index in range(8)]
    await until(lambda: server.engine.num_open == 8)
    code, details = await failure(server.stub.Generate(prompt()))
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED and "--max-concurrent-requests is 8" in details
    assert (await stream_failure(server.stub.GenerateStream(prompt())))[1] == grpc.StatusCode.RESOURCE_EXHAUSTED
    server.engine.resume.set()
    answers = await asyncio.gather(*calls)
    assert [answer.summary.prompt_tokens for answer in answers] == [5] * 8
    assert (await server.stub.Generate(prompt())).text


async def test_one_failed_request_ends_alone(server):
    server.engine.error, server.engine.fail_at = NonFiniteLogitsError("the model gave NaN"), 3
    assert await stream_failure(server.stub.GenerateStream(prompt())) == (3, grpc.StatusCode.INTERNAL)
    assert await failure(server.stub.Generate(prompt())) == (grpc.StatusCode.INTERNAL, "the model gave NaN")
    server.engine.error = None
    assert (await server.stub.Generate(prompt())).text


async def health(server, service="") -> int:
    stub = health_pb2_grpc.HealthStub(server.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_health(server_helpers):
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    names = ("", "specserve.v1.TextGeneration")
    async with server_helpers.running(is_open=False) as server:
        assert [await health(server, name) for name in names] == [not_serving, not_serving]
        code, details = await failure(server.stub.Generate(prompt()))
        assert code == UNAVAILABLE and "loading" in details
        assert (await failure(server.stub.Info(pb.InfoRequest())))[0] == UNAVAILABLE
        assert (await failure(server.stub.Tokenize(pb.TokenizeRequest(text="a"))))[0] == UNAVAILABLE
        watch = health_pb2_grpc.HealthStub(server.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == not_serving
        await server.server.open(server.serving)
        assert (await watch.read()).status == serving
        assert [await health(server, name) for name in names] == [serving, serving]
        assert (await server.stub.Generate(prompt())).text
        assert (await failure(health(server, "nope")))[0] == grpc.StatusCode.NOT_FOUND
        await server.server.begin_shutdown()
        assert (await watch.read()).status == not_serving
        assert [await health(server, name) for name in names] == [not_serving, not_serving]
        assert (await failure(server.stub.Generate(prompt())))[0] == UNAVAILABLE
        assert (await server.stub.Info(pb.InfoRequest())).model_id == "fake"
        start = time.monotonic()
        await server.server.stop()
        assert time.monotonic() - start < 3  # the open Watch doesn't hold it


async def test_reflection(server):
    stub = reflection_pb2_grpc.ServerReflectionStub(server.channel)
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="specserve.v1.TextGeneration"),
    ]
    listed, file = [answer async for answer in stub.ServerReflectionInfo(iter(requests))]
    names = {service.name for service in listed.list_services_response.service}
    assert names == {
        "specserve.v1.TextGeneration",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert b"GenerateStream" in file.file_descriptor_response.file_descriptor_proto[0]


async def test_shutdown_lets_ended_streams_get_their_status(server):
    server.engine.hold_at = 2
    call = server.stub.GenerateStream(prompt())
    await call.read()
    await server.server.begin_shutdown()
    stopping = asyncio.ensure_future(server.server.stop())
    await asyncio.sleep(0.8)
    server.engine.resume.set()
    events = await rest(call)
    assert events[-1].summary.generated_tokens == 27
    assert await call.code() == OK
    await stopping
