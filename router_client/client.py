"""The client whose calls block."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specserve.proto import specserve_pb2 as pb
from specserve.proto import specserve_pb2_grpc
from specserve.router_client import messages
from specserve.router_client.channel import DEFAULT_MAX_MESSAGE_BYTES, Endpoint
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
# How often a server that answers, but isn't ready, is asked again.
READY_POLL_S = 0.1


class EventStream(Iterator[StreamEvent]):
    """The events of one generation. The call is on its way from the start; closing the stream cancels it.

    It closes at the end of a `with` block, by `close()` (from any thread), and when it is dropped, so `break` in
    `for event in client.stream(...)` also cancels. After `close()` the iteration ends without an error.
    """

    def __init__(
        self, method: Callable[..., Any], request: pb.GenerateRequest, policy: RetryPolicy, timeout_s: float | None
    ) -> None:
        self._attempts = Attempts(policy, timeout_s)
        self._method = method
        self._request = request
        self._started = False  # whether an event was delivered: from then on nothing is tried again
        self._complete = False  # whether the summary was delivered
        self._closed = threading.Event()
        self._lock = threading.Lock()  # between close() and a new try in another thread
        self._call = method(request, timeout=self._attempts.remaining_s)

    def __next__(self) -> StreamEvent:
        """The next event.

        Raises:
            SpecserveError: the call failed; with code UNAVAILABLE only once the retries are used up, or after the
                first event.
        """
        while not self._closed.is_set():
            try:
                message = next(self._call)
            except StopIteration:
                break
            except grpc.RpcError as error:
                self._retry_or_raise(error)
            except BaseException:  # KeyboardInterrupt while waiting
                self.close()
                raise
            else:
                self._started = True
                self._complete = message.HasField("summary")
                return messages.event_from(message)
        if not self._closed.is_set():
            self.close()
            if not self._complete:
                raise SpecserveError(grpc.StatusCode.DATA_LOSS, "the stream ended without a summary")
        raise StopIteration

    def _retry_or_raise(self, error: grpc.RpcError) -> None:
        if self._closed.is_set():
            return
        delay = None if self._started else self._attempts.delay_before_retry(error.code())
        if delay is None:
            self.close()
            raise error_from(error) from error
        self._closed.wait(delay)
        with self._lock:
            if not self._closed.is_set():
                self._call = self._method(self._request, timeout=self._attempts.remaining_s)

    def close(self) -> None:
        """Cancel the call, if it isn't over."""
        with self._lock:
            self._closed.set()
            self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_call"):
            self.close()


class Client:
    """A client of one or several specserve servers; safe to share between threads.

    Args:
        targets: "host:port", "unix:/path", a gRPC name ("dns:///host:port"), or a list of IP addresses or sockets;
            calls go round-robin over all addresses whose health is SERVING.
        credentials: for TLS, e.g. `grpc.ssl_channel_credentials()`; None: plain text.
        options: further gRPC channel arguments.
        timeout_s: the deadline of each call in seconds, retries included, unless the call has its own; None: none.
        max_message_bytes: the largest message to send or receive.
        retry: how calls are tried again that end UNAVAILABLE before they brought anything.

    Raises:
        ValueError: an argument that can't be used, at once; and from calls, before anything is sent.
        SpecserveError: from calls, when they fail.
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
        self._channel = self._endpoint.open(health_checked=True)
        # Without the health watch, so that a server that drains can still be asked how it is.
        self._control_channel = self._endpoint.open(health_checked=False)
        self._stub = specserve_pb2_grpc.TextGenerationStub(self._channel)
        self._control_stub = specserve_pb2_grpc.TextGenerationStub(self._control_channel)

    def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """Generate and return everything at once.

        Args:
            prompt: a text, token ids, or chat messages (mappings with "role" and "content").
            timeout_s: the deadline of this call in seconds.
            **options: see `GenerateOptions`.
        """
        request = messages.generate_request(prompt, options)
        return messages.generation_from(self._call(self._stub.Generate, request, timeout_s))

    def stream(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> EventStream:
        """Generate and return an iterator of events; arguments as in `generate`."""
        request = messages.generate_request(prompt, options)
        return EventStream(self._stub.GenerateStream, request, self._policy, self._timeout(timeout_s))

    def tokenize(self, prompt: Prompt, *, truncate: int | None = None, timeout_s: float | None = None) -> Tokenization:
        """The token ids of a text or of chat messages, as `generate` would feed them to the model."""
        request = messages.tokenize_request(prompt, truncate)
        return messages.tokenization_from(self._call(self._stub.Tokenize, request, timeout_s))

    def info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """The model, the limits and the load of one of the servers, also of one that drains."""
        return messages.info_from(self._call(self._control_stub.Info, pb.InfoRequest(), timeout_s))

    def health(self, *, timeout_s: float | None = None) -> HealthStatus:
        """The health that one of the servers reports; SpecserveError UNAVAILABLE if none can be reached."""
        check = health_pb2_grpc.HealthStub(self._control_channel).Check
        return messages.health_from(self._call(check, health_pb2.HealthCheckRequest(), timeout_s))

    def wait_until_ready(self, timeout_s: float = 60.0) -> None:
        """Return once a server takes calls; SpecserveError DEADLINE_EXCEEDED after `timeout_s` seconds."""
        check = health_pb2_grpc.HealthStub(self._channel).Check
        attempts = Attempts(self._policy, timeout_s)
        status = "it has not been asked"
        while attempts.remaining_s != 0:
            try:
                answer = check(health_pb2.HealthCheckRequest(), timeout=attempts.remaining_s)
                status = messages.health_from(answer)
                if status is HealthStatus.SERVING:
                    return
            except grpc.RpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise error_from(error) from error
                status = error.details() or error.code().name
            time.sleep(READY_POLL_S)
        raise not_ready(self._endpoint.target, timeout_s, status)

    def _timeout(self, timeout_s: float | None) -> float | None:
        return self._timeout_s if timeout_s is None else timeout_s

    def _call(self, method: Callable[..., T], request: object, timeout_s: float | None) -> T:
        attempts = Attempts(self._policy, self._timeout(timeout_s))
        while True:
            try:
                return method(request, timeout=attempts.remaining_s)
            except grpc.RpcError as error:
                delay = attempts.delay_before_retry(error.code())
                if delay is None:
                    raise error_from(error) from error
            time.sleep(delay)

    def close(self) -> None:
        """Close the connections; calls that still run end with CANCELLED."""
        self._channel.close()
        self._control_channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
