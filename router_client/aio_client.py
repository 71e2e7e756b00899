"""The client for asyncio; the same surface as `Client`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
import grpc.aio
from grpc.aio import EOF  # type: ignore[attr-defined]  # missing in grpc-stubs
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specserve.proto import specserve_pb2 as pb
from specserve.proto import specserve_pb2_grpc
from specserve.router_client import messages
from specserve.router_client.channel import DEFAULT_MAX_MESSAGE_BYTES, Endpoint
from specserve.router_client.client import READY_POLL_S
from specserve.router_client.errors import SpecserveError, error_from, not_ready
from specserve.router_client.retry import Attempts, RetryPolicy
from specserve.router_client.types import (
    GenerateOptions,
    Generation,
    HealthStatus,
    Prompt,
    ServerInfo,
    StreamEvent,
    Tokenization,
)

T = TypeVar("T")


def _is_task_cancelled() -> bool:
    """Whether a CancelledError is for this task; grpc.aio also raises it for a call that was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class AsyncEventStream(AsyncIterator[StreamEvent]):
    """The events of one generation. The call is on its way from the start; closing the stream cancels it.

    It closes at the end of an `async with` block, by `aclose()`, when the task that reads it is cancelled, and
    when it is dropped, so `break` in `async for event in client.stream(...)` also cancels. After `aclose()` the
    iteration ends without an error.
    """

    def __init__(
        self, method: Callable[..., Any], request: pb.GenerateRequest, policy: RetryPolicy, timeout_s: float | None
    ) -> None:
        self._attempts = Attempts(policy, timeout_s)
        self._method = method
        self._request = request
        self._started = False  # whether an event was delivered: from then on nothing is tried again
        self._complete = False  # whether the summary was delivered
        self._closed = asyncio.Event()
        self._call = method(request, timeout=self._attempts.remaining_s)

    async def __anext__(self) -> StreamEvent:
        """The next event; raises like `EventStream.__next__`."""
        while not self._closed.is_set():
            try:
                message = await self._call.read()
            except grpc.RpcError as error:
                await self._retry_or_raise(error)
                continue
            except asyncio.CancelledError:
                closed_here = self._closed.is_set()
                self._close()
                if _is_task_cancelled():
                    raise
                if not closed_here:
                    raise SpecserveError(grpc.StatusCode.CANCELLED, "the client was closed") from None
                break
            if message is EOF:
                break
            self._started = True
            self._complete = message.HasField("summary")
            return messages.event_from(message)
        if not self._closed.is_set():
            self._close()
            if not self._complete:
                raise SpecserveError(grpc.StatusCode.DATA_LOSS, "the stream ended without a summary")
        raise StopAsyncIteration

    async def _retry_or_raise(self, error: grpc.RpcError) -> None:
        if self._closed.is_set():
            return
        delay = None if self._started else self._attempts.delay_before_retry(error.code())
        if delay is None:
            self._close()
            raise error_from(error) from error
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), delay)
        if not self._closed.is_set():
            self._call = self._method(self._request, timeout=self._attempts.remaining_s)

    def _close(self) -> None:
        self._closed.set()
        self._call.cancel()

    async def aclose(self) -> None:
        """Cancel the call, if it isn't over."""
        self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def __del__(self) -> None:
        if hasattr(self, "_call"):
            self._call.cancel()


class AioClient:
    """A client of one or several specserve servers for one event loop; arguments and errors as in `Client`.

    It may be made outside of the loop: it connects with its first call.
    """

    def __init__(
        self,
        targets: str | Sequence[str],
        *,
        credentials: grpc.ChannelCredentials | None = None,
        options: Sequence[tuple[str, Any]] | None = None,
        timeout_s: float | None = None,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        retry: RetryPolicy | None = None,
    ) -> None:
        self._endpoint = Endpoint(targets, credentials, tuple(options or ()), max_message_bytes)
        self._policy = retry or RetryPolicy()
        self._timeout_s = timeout_s
        Attempts(self._policy, timeout_s)  # refuses a timeout that can't be used
        self._channels: dict[bool, grpc.aio.Channel] = {}  # by whether the health watch is on
        self._is_closed = False

    def _channel(self, *, health_checked: bool) -> grpc.aio.Channel:
        # A channel of grpc.aio belongs to the loop in which it is made.
        if self._is_closed:
            raise ValueError("the client is closed")
        if health_checked not in self._channels:
            self._channels[health_checked] = self._endpoint.open_aio(health_checked=health_checked)
        return self._channels[health_checked]

    def _stub(self, *, health_checked: bool = True) -> "specserve_pb2_grpc.TextGenerationAsyncStub":
        return specserve_pb2_grpc.TextGenerationStub(self._channel(health_checked=health_checked))

    async def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """Generate and return everything at once; see `Client.generate`."""
        request = messages.generate_request(prompt, options)
        return messages.generation_from(await self._call(self._stub().Generate, request, timeout_s))

    def stream(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncEventStream:
        """Generate and return an asynchronous iterator of events; to be called within the event loop."""
        request = messages.generate_request(prompt, options)
        return AsyncEventStream(self._stub().GenerateStream, request, self._policy, self._timeout(timeout_s))

    async def tokenize(
        self, prompt: Prompt, *, truncate: int | None = None, timeout_s: float | None = None
    ) -> Tokenization:
        """The token ids of a text or of chat messages, as `generate` would feed them to the model."""
        request = messages.tokenize_request(prompt, truncate)
        return messages.tokenization_from(await self._call(self._stub().Tokenize, request, timeout_s))

    async def info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """The model, the limits and the load of one of the servers, also of one that drains."""
        method = self._stub(health_checked=False).Info
        return messages.info_from(await self._call(method, pb.InfoRequest(), timeout_s))

    async def health(self, *, timeout_s: float | None = None) -> HealthStatus:
        """The health that one of the servers reports; SpecserveError UNAVAILABLE if none can be reached."""
        check = health_pb2_grpc.HealthStub(self._channel(health_checked=False)).Check
        return messages.health_from(await self._call(check, health_pb2.HealthCheckRequest(), timeout_s))

    async def wait_until_ready(self, timeout_s: float = 60.0) -> None:
        """Return once a server takes calls; SpecserveError DEADLINE_EXCEEDED after `timeout_s` seconds."""
        check: Any = health_pb2_grpc.HealthStub(self._channel(health_checked=True)).Check
        attempts = Attempts(self._policy, timeout_s)
        status = "it has not been asked"
        while attempts.remaining_s != 0:
            try:
                answer = await check(health_pb2.HealthCheckRequest(), timeout=attempts.remaining_s)
                status = messages.health_from(answer)
                if status is HealthStatus.SERVING:
                    return
            except grpc.RpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise error_from(error) from error
                status = error.details() or error.code().name
            await asyncio.sleep(READY_POLL_S)
        raise not_ready(self._endpoint.target, timeout_s, status)

    def _timeout(self, timeout_s: float | None) -> float | None:
        return self._timeout_s if timeout_s is None else timeout_s

    async def _call(self, method: Callable[..., Awaitable[T]], request: object, timeout_s: float | None) -> T:
        attempts = Attempts(self._policy, self._timeout(timeout_s))
        while True:
            try:
                return await method(request, timeout=attempts.remaining_s)
            except grpc.RpcError as error:
                delay = attempts.delay_before_retry(error.code())
                if delay is None:
                    raise error_from(error) from error
            except asyncio.CancelledError:
                if _is_task_cancelled():
                    raise
                raise SpecserveError(grpc.StatusCode.CANCELLED, "the client was closed") from None
            await asyncio.sleep(delay)

    async def close(self) -> None:
        """Close the connections; calls that still run end with CANCELLED."""
        self._is_closed = True
        for channel in self._channels.values():
            await channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
