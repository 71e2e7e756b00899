"""The TextGeneration service: requests in, events of the engine out."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

import grpc
import grpc.aio

from specserve.proto import specserve_pb2 as pb
from specserve.server.config import ServerConfig
from specserve.server.convert import RequestConverter
from specserve.server.engine.errors import DrainingError, QueueFullError
from specserve.server.engine.sequence import Request
from specserve.server.errors import NotReadyError
from specserve.server.parse import parse_request
from specserve.server.responses import event_message, info_message, join_events, token_text
from specserve.server.serving import Serving

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["TextGeneration"].full_name
_NUM_TOKENIZER_THREADS = 4

T = TypeVar("T")


class TextGenerationService:
    """Answers raw requests (bytes); errors are exceptions, which interceptors.py turns into statuses."""

    def __init__(self, config: ServerConfig, *, version: str) -> None:
        self._config = config
        self._version = version
        self._serving: Serving | None = None
        self._converter: RequestConverter | None = None
        self._ready_time = 0.0
        self._is_draining = False
        self._num_generating = 0
        # Tokenizing megabytes takes seconds, which the streams of others must not wait for.
        self._threads = ThreadPoolExecutor(_NUM_TOKENIZER_THREADS, thread_name_prefix="tokenize")

    def open(self, serving: Serving) -> None:
        """Answer from now on; the engine runs."""
        self._serving = serving
        self._converter = RequestConverter(
            serving.tokenizer,
            serving.chat_template,
            serving.description,
            max_stop_sequences=self._config.server.max_stop_sequences,
            max_top_n_tokens=self._config.server.max_top_n_tokens,
        )
        self._ready_time = time.monotonic()

    def begin_drain(self) -> None:
        """Refuse new work; Info goes on answering."""
        self._is_draining = True

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no generation is under way; False if it takes longer."""
        end = time.monotonic() + timeout_s
        while self._num_generating and time.monotonic() < end:
            await asyncio.sleep(0.01)
        return not self._num_generating

    def handlers(self) -> Any:
        """The methods, for a grpc.aio server; requests stay bytes, so that parse.py can name what is wrong."""
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        # Any: grpc-stubs knows only the handlers of the synchronous server.
        methods: dict[str, Any] = {
            "Generate": unary(self.generate, None, pb.GenerateResponse.SerializeToString),
            "GenerateStream": stream(self.generate_stream, None, pb.GenerateStreamResponse.SerializeToString),
            "Tokenize": unary(self.tokenize, None, pb.TokenizeResponse.SerializeToString),
            "Info": unary(self.info, None, pb.InfoResponse.SerializeToString),
        }
        return grpc.method_handlers_generic_handler(SERVICE_NAME, methods)

    async def generate(self, data: bytes, context: Any) -> pb.GenerateResponse:
        """Generate: the events of the stream, in one answer."""
        async with aclosing(self.generate_stream(data, context)) as events:
            return join_events([event async for event in events])

    async def generate_stream(self, data: bytes, context: Any) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        """GenerateStream. Closing the generator, as a cancelled call does, frees the request in the engine."""
        serving, converter = self._require_open()
        with self._admitted():
            message, request = await self._in_thread(_convert, converter, data)
            with_details = message.response.logprobs or message.response.top_n_tokens > 0
            async with aclosing(serving.engine.generate(request)) as events:
                async for event in events:
                    if event.error is not None:
                        raise event.error
                    yield event_message(event, serving.tokenizer, with_details=with_details)

    async def tokenize(self, data: bytes, context: Any) -> pb.TokenizeResponse:
        """Tokenize."""
        serving, converter = self._require_open()

        def answer() -> pb.TokenizeResponse:
            ids = converter.prompt(parse_request(pb.TokenizeRequest, data), enforce_limit=False)
            return pb.TokenizeResponse(token_ids=ids, tokens=[token_text(serving.tokenizer, i) for i in ids])

        return await self._in_thread(answer)

    async def info(self, data: bytes, context: Any) -> pb.InfoResponse:
        """Info; it is answered while the server drains, too."""
        parse_request(pb.InfoRequest, data)
        if self._serving is None:
            raise NotReadyError("the model is still loading; wait until the health service says SERVING")
        return info_message(
            self._serving,
            self._config,
            self._serving.engine.stats(),
            version=self._version,
            uptime_seconds=time.monotonic() - self._ready_time,
        )

    def _require_open(self) -> tuple[Serving, RequestConverter]:
        if self._is_draining:
            raise DrainingError("the server is shutting down; send the request to another one")
        if self._serving is None or self._converter is None:
            raise NotReadyError("the model is still loading; wait until the health service says SERVING")
        return self._serving, self._converter

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        """Counts a generation from its arrival on: prompts that wait to be tokenized take memory too."""
        limit = self._config.scheduler.max_concurrent_requests
        if self._num_generating >= limit:
            raise QueueFullError(
                f"{self._num_generating} requests are in the server, --max-concurrent-requests is {limit}; try again "
                "later"
            )
        self._num_generating += 1
        try:
            yield
        finally:
            self._num_generating -= 1

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)


def _convert(converter: RequestConverter, data: bytes) -> tuple[pb.GenerateRequest, Request]:
    message = parse_request(pb.GenerateRequest, data)
    return message, converter.request(message)
