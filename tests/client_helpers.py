"""A scripted server and blocking facades of both clients; loaded by the fixtures in conftest.py."""

import asyncio
import contextlib
import threading
from concurrent import futures

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from specserve.proto import specserve_pb2 as pb
from specserve.proto import specserve_pb2_grpc
from specserve.router_client.aio_client import AioClient
from specserve.router_client.client import Client
from specserve.router_client.retry import RetryPolicy

FAST_RETRY = RetryPolicy(max_attempts=4, initial_backoff_s=0.005, max_backoff_s=0.02)


def script(*pieces: str) -> list[pb.GenerateStreamResponse]:
    """One event a piece with two tokens each, and the summary in the last one."""
    events = [
        pb.GenerateStreamResponse(token_ids=[2 * i, 2 * i + 1], text=piece, generated_tokens=2 * i + 2)
        for i, piece in enumerate(pieces)
    ]
    events[-1].summary.CopyFrom(
        pb.GenerationSummary(
            finish_reason=pb.FINISH_REASON_EOS_TOKEN,
            prompt_tokens=5,
            generated_tokens=2 * len(pieces),
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
    )
    return events


class FakeServer(specserve_pb2_grpc.TextGenerationServicer):
    """Plays a script on a real port; counts what it is asked."""

    def __init__(self, address: str = "127.0.0.1:0", credentials: grpc.ServerCredentials | None = None) -> None:
        self.events = script("Grüße", " 🤗", " an\n", "alle")
        self.requests: list = []  # of all calls of TextGeneration
        self.num_unavailable = 0  # so many calls end UNAVAILABLE before they bring anything
        self.failure: tuple[int, grpc.StatusCode] | None = None  # after so many events; 0: at once, also unary
        self.hold_after: int | None = None  # after so many events (0: also unary) wait for release or cancellation
        self.released = threading.Event()
        self.cancelled = threading.Event()  # a held call was cancelled
        self.info = pb.InfoResponse(
            model_id="fake", vocab_size=1000, eos_token_ids=[2, 7], max_input_tokens=512, has_chat_template=True
        )
        self._server = grpc.server(futures.ThreadPoolExecutor(16), options=[("grpc.max_receive_message_length", -1)])
        specserve_pb2_grpc.add_TextGenerationServicer_to_server(self, self._server)
        self._health = health.HealthServicer(experimental_non_blocking=True)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if credentials is None:
            port = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, credentials)
        self.target = address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"
        self._server.start()

    @property
    def num_calls(self) -> int:
        return len(self.requests)

    def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        self._health.set("", status.SERVING if serving else status.NOT_SERVING)

    def stop(self) -> None:
        self.released.set()
        self._server.stop(0).wait()

    def _begin(self, request, context) -> None:
        self.requests.append(request)
        if self.hold_after is not None:
            # Not in _at: a call that is cancelled early never gets there.
            context.add_callback(lambda: self.released.is_set() or self.cancelled.set())
        if self.num_unavailable > 0:
            self.num_unavailable -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "not now")

    def _at(self, index: int, context) -> None:
        if self.failure is not None and self.failure[0] == index:
            context.abort(self.failure[1], "as the script says")
        if self.hold_after == index:
            while context.is_active() and not self.released.wait(0.01):
                pass

    def GenerateStream(self, request, context):
        self._begin(request, context)
        for index, event in enumerate(self.events):
            self._at(index, context)
            yield event
        self._at(len(self.events), context)

    def Generate(self, request, context):
        self._begin(request, context)
        self._at(0, context)
        return pb.GenerateResponse(
            token_ids=[i for event in self.events for i in event.token_ids],
            text="".join(event.text for event in self.events),
            details=[detail for event in self.events for detail in event.details],
            prompt=[detail for event in self.events for detail in event.prompt],
            summary=self.events[-1].summary,
        )

    def Tokenize(self, request, context):
        self._begin(request, context)
        return pb.TokenizeResponse(token_ids=[4, 5], tokens=["Gr", "ü"])

    def Info(self, request, context):
        self._begin(request, context)
        return self.info


class BlockingStream:
    """An AsyncEventStream as a blocking iterator."""

    def __init__(self, run, stream) -> None:
        self._run, self._stream = run, stream

    def __iter__(self):
        return self

    def __next__(self):
        async def advance():
            try:
                return await anext(self._stream)
            except StopAsyncIteration:
                return None

        event = self._run(advance())
        if event is None:
            raise StopIteration
        return event

    def __enter__(self):
        self._run(self._stream.__aenter__())
        return self

    def __exit__(self, *failure) -> None:
        self._run(self._stream.__aexit__(*failure))

    def close(self) -> None:
        self._run(self._stream.aclose())


class BlockingAioClient:
    """An AioClient, in an event loop of its own thread, with the surface of Client."""

    def __init__(self, *args, **kwargs) -> None:
        self._client = AioClient(*args, **kwargs)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def _run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def stream(self, *args, **kwargs):
        async def start():
            return self._client.stream(*args, **kwargs)

        return BlockingStream(self._run, self._run(start()))

    def __getattr__(self, name: str):
        return lambda *args, **kwargs: self._run(getattr(self._client, name)(*args, **kwargs))

    def close(self) -> None:
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()


@contextlib.contextmanager
def fake_servers():
    """A factory of servers that are stopped at the end."""
    servers: list[FakeServer] = []

    def start(*args, **kwargs) -> FakeServer:
        servers.append(FakeServer(*args, **kwargs))
        return servers[-1]

    try:
        yield start
    finally:
        for server in servers:
            server.stop()


@contextlib.contextmanager
def clients(kind: str):
    """A factory of clients of one kind ("sync" or "aio") that are closed at the end; retries are fast."""
    opened: list[Client | BlockingAioClient] = []

    def connect(targets, **kwargs):
        cls = Client if kind == "sync" else BlockingAioClient
        opened.append(cls(targets, **{"retry": FAST_RETRY, "timeout_s": 20.0, **kwargs}))
        return opened[-1]

    try:
        yield connect
    finally:
        for client in opened:
            client.close()
