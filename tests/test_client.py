"""Both clients against a scripted server on a real port (`connect` makes each in turn)."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import pytest

from specserve.proto import specserve_pb2 as pb
from specserve.router_client.client import Client
from specserve.router_client.errors import SpecserveError
from specserve.router_client.retry import RetryPolicy
from specserve.router_client.types import FinishReason, StreamEvent, Summary, Token, TopToken

PEM = (Path(__file__).parent / "data" / "loopback_tls.pem").read_text()
TEXT = "Grüße 🤗 an\nalle"
SUMMARY = Summary(FinishReason.EOS_TOKEN, 5, 8, 2**64 - 1, 0.25, 0.5, 1.5, 8, 6, 4, (4, 2), 2.5, 3)
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def failure_of(call, *args, **kwargs) -> SpecserveError:
    with pytest.raises(SpecserveError) as caught:
        call(*args, **kwargs)
    return caught.value


def drain(client, *args, **kwargs) -> list[StreamEvent]:
    return list(client.stream(*args, **kwargs))


# What the calls bring


def test_stream_brings_each_event_once(fake_server, connect):
    server = fake_server()
    events = drain(connect(server.target), "Hallo")
    assert [event.text for event in events] == ["Grüße", " 🤗", " an\n", "alle"]
    assert [event.token_ids for event in events] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [event.generated_tokens for event in events] == [2, 4, 6, 8]
    assert [event.summary for event in events] == [None, None, None, SUMMARY]
    assert server.requests == [pb.GenerateRequest(text="Hallo")]


def test_generate_brings_everything(fake_server, connect):
    generation = connect(fake_server().target).generate("Hallo")
    assert (generation.text, generation.token_ids, generation.summary) == (TEXT, tuple(range(8)), SUMMARY)


def test_details_keep_zero_apart_from_unset(fake_server, connect):
    server = fake_server()
    first = pb.TokenDetails(id=9, text="", special=True)
    zero = pb.TokenDetails(id=3, text="é", logprob=0.0, rank=1, top=[pb.TopToken(id=3, text="é", logprob=-0.5)])
    server.events[0].prompt.extend([first, zero])
    server.events[-1].details.extend([zero])
    server.events[-1].summary.stop_string = ""
    expected = Token(3, "é", 0.0, 1, False, (TopToken(3, "é", -0.5),))
    client = connect(server.target)
    events = drain(client, "x")
    assert events[0].prompt == (Token(9, "", None, None, True), expected)
    assert events[-1].details == (expected,)
    assert (events[-1].summary.stop_string, events[-1].summary.stop_token_id) == ("", None)
    generation = client.generate("x")
    assert (generation.prompt, generation.details) == (events[0].prompt, events[-1].details)


def test_options_reach_the_server(fake_server, connect):
    server = fake_server()
    client = connect(server.target)
    client.generate([{"role": "user", "content": "é"}], temperature=0.5, seed=2**64 - 1, stop="Z", truncate=7)
    drain(client, [5, 2**32 - 1], max_new_tokens=3, include_stop=False, logprobs=True, max_draft_tokens=0)
    assert server.requests == [
        pb.GenerateRequest(
            chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="é")]),
            sampling=pb.SamplingParameters(temperature=0.5, seed=2**64 - 1),
            stopping=pb.StoppingParameters(stop=["Z"]),
            truncate=7,
        ),
        pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[5, 2**32 - 1]),
            stopping=pb.StoppingParameters(max_new_tokens=3, include_stop=False),
            response=pb.ResponseOptions(logprobs=True),
            speculation=pb.SpeculationParameters(max_draft_tokens=0),
        ),
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ["ok", "\ud83d"]}, "stop[1]"),
        ({"temperature": "1"}, "temperature"),
        ({"timeout_s": 0}, "timeout_s"),
    ],
)
def test_bad_options_send_nothing(fake_server, connect, options, words):
    server = fake_server()
    client = connect(server.target)
    for call in (client.generate, client.stream):
        with pytest.raises(ValueError, match=words.replace("[", r"\[")):
            call("x", **options)
    with pytest.raises(ValueError, match="surrogate"):
        client.tokenize("a\ud83d")
    with pytest.raises(ValueError, match="timeout_s is -1"):
        connect(server.target, timeout_s=-1)
    with pytest.raises(TypeError, match="temprature"):
        client.generate("x", temprature=1.0)
    assert server.num_calls == 0


def test_tokenize_and_info(fake_server, connect):
    server = fake_server()
    client = connect(server.target)
    tokens = client.tokenize([{"role": "user", "content": "x"}], truncate=2)
    assert (tokens.token_ids, tokens.tokens) == ((4, 5), ("Gr", "ü"))
    assert server.requests[0].truncate == 2 and server.requests[0].chat.messages[0].content == "x"
    info = client.info()
    assert (info.model_id, info.eos_token_ids, info.max_input_tokens) == ("fake", (2, 7), 512)


def test_slow_reader_gets_all_events_and_the_status_after_them(fake_server, connect):
    server = fake_server()
    server.failure = (4, grpc.StatusCode.INTERNAL)
    received = []
    with pytest.raises(SpecserveError, match="INTERNAL: as the script says"):
        for event in connect(server.target).stream("x"):
            time.sleep(0.05)
            received.append(event.text)
    assert "".join(received) == TEXT


def test_stream_without_a_summary_is_an_error(fake_server, connect):
    server = fake_server()
    del server.events[-1]
    assert failure_of(drain, connect(server.target), "x").code is grpc.StatusCode.DATA_LOSS


def test_large_messages(fake_server, connect):
    server = fake_server()
    server.events[0].text = "é" * 3_000_000  # 6 MB, above gRPC's own limit
    assert len(connect(server.target).generate("x").text) > 3_000_000
    error = failure_of(connect(server.target, max_message_bytes=1_000_000).generate, "x")
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED


# Retries


@pytest.mark.parametrize("call", ["stream", "generate", "tokenize", "info"])
def test_unavailable_is_retried_before_anything_came(fake_server, connect, call):
    server = fake_server()
    server.num_unavailable = 3
    client = connect(server.target)
    if call == "stream":
        assert "".join(event.text for event in client.stream("x")) == TEXT
    else:
        getattr(client, call)(*(() if call == "info" else ("x",)))
    assert server.num_calls == 4


@pytest.mark.parametrize("call", ["stream", "generate"])
def test_retries_are_bounded_and_the_cause_is_kept(fake_server, connect, call):
    server = fake_server()
    server.num_unavailable = 100
    client = connect(server.target)
    error = failure_of(drain, client, "x") if call == "stream" else failure_of(client.generate, "x")
    assert (error.code, error.message, server.num_calls) == (UNAVAILABLE, "not now", 4)
    assert isinstance(error.__cause__, grpc.RpcError)


def test_unavailable_after_an_event_is_final(fake_server, connect):
    server = fake_server()
    server.failure = (1, UNAVAILABLE)
    stream = connect(server.target).stream("x")
    assert next(stream).text == "Grüße"
    assert failure_of(next, stream).code is UNAVAILABLE
    assert list(stream) == []
    assert server.num_calls == 1


@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL])
def test_other_failures_are_not_retried(fake_server, connect, code):
    server = fake_server()
    server.failure = (0, code)
    client = connect(server.target)
    assert failure_of(drain, client, "x").code is code
    assert failure_of(client.generate, "x").code is code
    assert server.num_calls == 2


def test_retries_end_with_the_deadline(fake_server, connect):
    server = fake_server()
    server.num_unavailable = 100
    client = connect(server.target, retry=RetryPolicy(max_attempts=50, initial_backoff_s=30, max_backoff_s=60))
    start = time.monotonic()
    assert failure_of(drain, client, "x", timeout_s=2).code is UNAVAILABLE
    assert failure_of(client.generate, "x", timeout_s=2).code is UNAVAILABLE
    assert time.monotonic() - start < 10 and server.num_calls == 2


# Deadlines and cancellation


@pytest.mark.parametrize("hold_after", [0, 2])
@pytest.mark.parametrize("own", [True, False])
def test_deadline(fake_server, connect, hold_after, own):
    server = fake_server()
    server.hold_after = hold_after
    client = connect(server.target, **({} if own else {"timeout_s": 0.3}))
    options = {"timeout_s": 0.3} if own else {}
    assert failure_of(drain, client, "x", **options).code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert server.cancelled.wait(5)
    if hold_after == 0:
        assert failure_of(client.generate, "x", **options).code is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("way", ["close", "with"])
def test_closing_the_stream_cancels_the_call(fake_server, connect, way):
    server = fake_server()
    server.hold_after = 1
    stream = connect(server.target).stream("x")
    assert next(stream).text == "Grüße"
    if way == "close":
        stream.close()
    else:
        with stream:
            pass
    assert server.cancelled.wait(5)
    assert list(stream) == []


def test_leaving_the_loop_cancels_the_call(fake_server):
    server = fake_server()
    server.hold_after = 1
    with Client(server.target) as client:
        for event in client.stream("x"):
            assert event.text == "Grüße"
            break
        assert server.cancelled.wait(5)


def test_closing_from_another_thread_ends_the_iteration(fake_server, connect):
    server = fake_server()
    server.hold_after = 1
    stream = connect(server.target).stream("x")
    threading.Timer(0.2, stream.close).start()
    assert [event.text for event in stream] == ["Grüße"]
    assert server.cancelled.wait(5)


def test_closing_during_the_wait_for_a_retry(fake_server, connect):
    server = fake_server()
    server.num_unavailable = 100
    stream = connect(server.target, timeout_s=None, retry=RetryPolicy(9, 60.0, 60.0)).stream("x")
    threading.Timer(0.2, stream.close).start()
    start = time.monotonic()
    assert list(stream) == []
    assert time.monotonic() - start < 10 and server.num_calls == 1


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_interrupt_cancels_the_call(fake_server, call):
    server = fake_server()
    server.hold_after = 0

    def interrupt(*_):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        with Client(server.target) as client:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            stream = None
            with pytest.raises(KeyboardInterrupt):
                if call == "generate":
                    client.generate("x")
                else:
                    stream = client.stream("x")
                    next(stream)
            assert server.cancelled.wait(5)
    finally:
        signal.signal(signal.SIGALRM, previous)


def test_importing_the_client_loads_nothing_heavy():
    names = [path.stem for path in Path(sys.modules[Client.__module__].__file__).parent.glob("*.py")]
    assert {"client", "aio_client", "cli", "bench"} <= set(names)
    modules = ", ".join(f"specserve.router_client.{name}" for name in names if name != "__init__")
    code = f"import sys, {modules}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    roots = {".".join(name.split(".")[:2]) for name in loaded if name.startswith("specserve.")}
    assert roots == {"specserve.proto", "specserve.router_client"}
    assert not {"torch", "transformers", "tokenizers", "numpy"} & set(loaded)
