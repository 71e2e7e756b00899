"""The grpc.aio server: addresses, health, reflection, and its life from binding to the exit code."""

import asyncio
import concurrent.futures
import signal
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from loguru import logger

from specserve.models.hub import ModelError
from specserve.server.config import ConfigError, ListenOptions, ServerConfig
from specserve.server.interceptors import CallInterceptor
from specserve.server.listen import ListenError, check_tcp, check_unix
from specserve.server.process import leave
from specserve.server.service import SERVICE_NAME, TextGenerationService
from specserve.server.serving import Serving
from specserve.server.version import package_version
from specserve.server.worker.errors import RankError

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
LAST_MESSAGES_S = 5.0  # for the last messages of streams that have ended
ENGINE_STOP_S, STUCK_ENGINE_S = 10.0, 0.5

T = TypeVar("T")


def _server_options(listen: ListenOptions) -> list[tuple[str, Any]]:
    return [
        ("grpc.so_reuseport", 0),  # else a second server on the same port would start, and get half of the calls
        ("grpc.max_receive_message_length", listen.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        # Clients that vanish without closing (a pulled cable) are noticed, and their requests freed.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ]


class GrpcServer:
    """Listens from `start` on; health says NOT_SERVING until `open`."""

    def __init__(self, config: ServerConfig) -> None:
        self._listen = config.server
        self.service = TextGenerationService(config, version=package_version())
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # not in grpc-stubs
        self.address = ""

    def check_addresses(self) -> None:
        """Raise ListenError if they are taken or can't be had."""
        if self._listen.port is not None:
            check_tcp(self._listen.hostname, self._listen.port)
        if self._listen.unix_socket is not None:
            check_unix(self._listen.unix_socket)

    async def start(self) -> None:
        """Bind and answer; `address` is then what clients connect to. Raises ListenError."""
        self._server = grpc.aio.server(
            interceptors=[CallInterceptor(SERVICE_NAME)], options=_server_options(self._listen)
        )
        self._server.add_generic_rpc_handlers((self.service.handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        await self._set_health(NOT_SERVING)
        self.address = " and ".join(self._bind())
        await self._server.start()

    async def open(self, serving: Serving) -> None:
        """Answer requests: the model is loaded and the engine runs."""
        self.service.open(serving)
        await self._set_health(SERVING)

    async def begin_shutdown(self) -> None:
        """Health says NOT_SERVING for good, and new requests are refused."""
        self.service.begin_drain()
        await self._health.enter_graceful_shutdown()

    async def stop(self) -> None:
        """Close; calls that have ended get their status out, those still open are cancelled."""
        await self.service.wait_idle(LAST_MESSAGES_S)
        await self._server.stop(grace=0.5)

    async def _set_health(self, status: Any) -> None:
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)

    def _bind(self) -> list[str]:
        self.check_addresses()
        addresses = []
        listen = self._listen
        if listen.port is not None:
            host = f"[{listen.hostname}]" if ":" in listen.hostname else listen.hostname
            addresses.append(f"{host}:{self._add_port(f'{host}:{listen.port}')}")
        if listen.unix_socket is not None:
            addresses.append(f"unix:{listen.unix_socket}")
            self._add_port(addresses[-1])
        return addresses

    def _add_port(self, address: str) -> int:
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ListenError(f"can't listen on {address}: {error}") from error
        if port == 0:
            raise ListenError(f"can't listen on {address}")
        return int(port)


class _Signals:
    """SIGTERM and SIGINT, counted."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.number = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._receive, number)

    def _receive(self, number: int) -> None:
        self.number = self.number or number
        (self.second if self.first.is_set() else self.first).set()


def _in_daemon_thread(function: Callable[[], T]) -> "asyncio.Future[T]":
    """The function's result; unlike a pool's, the thread doesn't keep the process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(set_result: Callable[[Any], None], result: Any) -> None:
        if not future.done():
            set_result(result)

    def run() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = (future.set_result, function())
        except Exception as error:
            outcome = (future.set_exception, error)
        try:
            loop.call_soon_threadsafe(settle, *outcome)
        except RuntimeError:
            logger.debug("loading ended after the server")

    threading.Thread(target=run, name="load", daemon=True).start()
    return future


async def _first_of(*waits: "asyncio.Future[Any]") -> None:
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)


class _Life:
    """One run of the server, from binding to the exit code."""

    def __init__(
        self,
        config: ServerConfig,
        check: Callable[[ServerConfig], None],
        build: Callable[[ServerConfig], Serving],
        on_ready: Callable[[str, Serving], None],
        failure: "concurrent.futures.Future[RankError] | None",
    ) -> None:
        self._config = config
        self._failure = failure
        self._check = check
        self._build = build
        self._on_ready = on_ready
        self._server = GrpcServer(config)
        self.leaves_threads = False  # at work, so that the interpreter can't be taken down around them

    async def run(self) -> int:
        """The exit code. Raises ListenError and whatever `check` and `build` raise."""
        self._server.check_addresses()  # before torch is loaded, which takes seconds
        signals = _Signals()
        term = asyncio.ensure_future(signals.first.wait())
        self._failed = asyncio.get_running_loop().create_future()
        if self._failure is not None:
            self._failed = asyncio.wrap_future(self._failure)
        checking = _in_daemon_thread(lambda: self._check(self._config))
        if not await self._is_done(checking, term):
            return 0
        checking.result()
        await self._server.start()
        try:
            logger.info("listening on {}; loading {}", self._server.address, self._config.model.model_id)
            loading = _in_daemon_thread(lambda: self._build(self._config))
            if not await self._is_done(loading, term):
                logger.info("stopped while loading")
                return 0
            return await self._serve(loading.result(), signals, term)
        finally:
            await self._server.begin_shutdown()
            await self._server.stop()

    async def _is_done(self, work: "asyncio.Future[Any]", term: "asyncio.Future[Any]") -> bool:
        """Whether the work of a thread came to its end, or a signal came first. Raises the failure of a rank."""
        await _first_of(work, term, self._failed)
        self.leaves_threads = not work.done()
        if self._failed.done() and not (work.done() and work.exception()):
            raise self._failed.result()
        return work.done()

    async def _serve(self, serving: Serving, signals: _Signals, term: "asyncio.Future[Any]") -> int:
        engine = serving.engine
        await engine.start()
        self._failed.add_done_callback(lambda failed: engine.fail(failed.result()))
        try:
            await self._server.open(serving)
            self._on_ready(self._server.address, serving)
            await _first_of(engine.dead, term)
            await self._server.begin_shutdown()
            if not engine.dead.done():
                await self._drain(serving, signals)
            if engine.dead.done():
                logger.opt(exception=engine.dead.result()).error("the engine has failed")
                return 1
            return 128 + signals.number if signals.second.is_set() else 0
        finally:
            try:
                # After the failure of another rank it may wait for ever.
                stop_s = STUCK_ENGINE_S if self._failed.done() else ENGINE_STOP_S
                await asyncio.wait_for(engine.stop(), stop_s)
            except TimeoutError:
                logger.error("the engine did not stop within {:g} s", stop_s)
                self.leaves_threads = True

    async def _drain(self, serving: Serving, signals: _Signals) -> None:
        timeout_s = self._config.server.drain_timeout_s
        logger.info("shutting down; running requests have {:g} s to finish", timeout_s)
        drain = asyncio.ensure_future(serving.engine.drain(timeout_s))
        again = asyncio.ensure_future(signals.second.wait())
        await _first_of(drain, again)
        if not drain.done():
            logger.info("ending at once")
            drain.cancel()
            await serving.engine.drain(0)
        again.cancel()


def run_server(
    config: ServerConfig,
    check: Callable[[ServerConfig], None],
    build: Callable[[ServerConfig], Serving],
    on_ready: Callable[[str, Serving], None],
    *,
    failure: "concurrent.futures.Future[RankError] | None" = None,
    at_exit: Callable[[str], None] = lambda error: None,
) -> int:
    """Serve until a signal or the engine's end; the exit code.

    `check` runs before the server listens, `build` on a thread while it listens already. `on_ready` hears the address
    when requests can be answered. `failure` is that of another rank, which ends the server; `at_exit` hears why
    it ends, "" if it was asked to. Errors that a user can put right take one line in the log.
    """
    life = _Life(config, check, build, on_ready, failure)

    async def run() -> int:
        code = await life.run()
        at_exit("" if code == 0 or code > 128 else "the server has failed")
        if life.leaves_threads:
            leave(code)
        return code

    try:
        return asyncio.run(run())
    except (ListenError, ModelError, RankError, ConfigError) as error:
        logger.error("{}", error)
        at_exit(str(error))
        code = 2 if isinstance(error, ConfigError) else 1
    except Exception as error:
        logger.opt(exception=error).error("the server has failed")
        at_exit(f"{type(error).__name__}: {error}")
        code = 1
    if life.leaves_threads:
        leave(code)
    return code
