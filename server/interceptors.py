"""Around every call of TextGeneration: exceptions become statuses, and its end a line in the log."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from loguru import logger

from specserve.server.engine.errors import (
    DrainingError,
    EngineDeadError,
    NonFiniteLogitsError,
    QueueFullError,
    RequestTooLargeError,
)
from specserve.server.errors import InvalidRequestError, NotReadyError, UnsupportedError

STATUS_OF_ERROR: dict[type[Exception], grpc.StatusCode] = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    RequestTooLargeError: grpc.StatusCode.INVALID_ARGUMENT,
    UnsupportedError: grpc.StatusCode.UNIMPLEMENTED,
    QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    NotReadyError: grpc.StatusCode.UNAVAILABLE,
    DrainingError: grpc.StatusCode.UNAVAILABLE,
    EngineDeadError: grpc.StatusCode.UNAVAILABLE,
    NonFiniteLogitsError: grpc.StatusCode.INTERNAL,
}
MAX_DETAILS_CHARACTERS = 1000  # they travel in a header, and clients accept 8 KiB of these


def status_of(error: Exception) -> tuple[grpc.StatusCode, str]:
    """Status code and details of a failed call; an error that isn't in the table is a fault of the server."""
    for kind, code in STATUS_OF_ERROR.items():
        if isinstance(error, kind):
            return code, _one_line(str(error))
    return grpc.StatusCode.INTERNAL, f"internal error ({type(error).__name__}); the server's log has the details"


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    if len(line) <= MAX_DETAILS_CHARACTERS:
        return line
    half = MAX_DETAILS_CHARACTERS // 2
    return f"{line[:half]} … {line[-half:]}"  # both ends say something: the field, and what to do


class _Call:
    """What the log says of one call."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.start = time.perf_counter()
        self.num_tokens = 0
        self.summary: Any = None

    def see(self, response: Any) -> None:
        """Take note of a response message of any method."""
        if hasattr(response, "summary"):
            self.num_tokens += len(response.token_ids)
            if response.HasField("summary"):
                self.summary = response.summary

    def log(self, code: grpc.StatusCode, details: str = "") -> None:
        """Write the line."""
        fields: dict[str, Any] = {"method": self.method, "status": code.name}
        fields["seconds"] = round(time.perf_counter() - self.start, 4)
        if self.summary is not None:
            summary = self.summary
            fields |= {"prompt_tokens": summary.prompt_tokens, "generated_tokens": summary.generated_tokens}
            for name in ("queue_seconds", "prefill_seconds", "decode_seconds"):
                fields[name] = round(getattr(summary, name), 4)
        elif self.num_tokens:
            fields["generated_tokens"] = self.num_tokens
        if details:
            fields["details"] = details
        text = " ".join(f"{name}={value}" for name, value in fields.items() if name not in ("method", "status"))
        logger.bind(**fields).info("{} {} {}", self.method, code.name, text)


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in grpc-stubs alone
    """Handles the calls of one service; those of health and reflection pass through."""

    def __init__(self, service_name: str) -> None:
        self._prefix = f"/{service_name}/"

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler of the call."""
        handler: Any = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(self._prefix):
            return handler
        name = method.removeprefix(self._prefix)
        if handler.response_streaming:
            return handler._replace(unary_stream=_streaming(name, handler.unary_stream))
        return handler._replace(unary_unary=_unary(name, handler.unary_unary))


def _unary(method: str, behavior: Callable[[bytes, Any], Awaitable[Any]]) -> Callable[[bytes, Any], Awaitable[Any]]:
    async def wrapped(request: bytes, context: Any) -> Any:
        async with _watched(method, context) as call:
            response = await behavior(request, context)
            call.see(response)
            return response

    return wrapped


def _streaming(
    method: str, behavior: Callable[[bytes, Any], AsyncGenerator[Any, None]]
) -> Callable[[bytes, Any], Awaitable[None]]:
    # Not a generator itself: grpc.aio leaves a generator unclosed when the call is cancelled while it writes.
    async def wrapped(request: bytes, context: Any) -> None:
        async with _watched(method, context) as call, aclosing(behavior(request, context)) as responses:
            async for response in responses:
                call.see(response)
                await context.write(response)

    return wrapped


@asynccontextmanager
async def _watched(method: str, context: Any) -> AsyncIterator[_Call]:
    call = _Call(method)
    try:
        yield call
    except asyncio.CancelledError:
        remaining = context.time_remaining()
        is_late = remaining is not None and remaining <= 0
        call.log(grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED)
        raise
    except Exception as error:
        code, details = status_of(error)
        if type(error) not in STATUS_OF_ERROR:
            logger.opt(exception=error).error("{} failed", method)
        call.log(code, details)
        await context.abort(code, details)
    else:
        call.log(grpc.StatusCode.OK)
