"""The engine on a thread of its own, seen from asyncio.

The thread owns the Engine; the event loop talks to it through a queue of commands and hears from it through
one call_soon_threadsafe a step.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from functools import partial

from specserve.server.engine.engine import Engine, EngineStats
from specserve.server.engine.errors import DrainingError, EngineDeadError, QueueFullError
from specserve.server.engine.sequence import Request, SequenceEvent


class _Stream:
    """The events of one request on their way to its caller."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.request_id: int | None = None  # set by the engine thread
        self.events: asyncio.Queue[SequenceEvent] = asyncio.Queue()


class AsyncEngine:
    """Accepts requests from the event loop that called `start`; at most max_concurrent_requests at once.

    `engine` belongs to the thread from `start` on.
    """

    def __init__(self, engine: Engine, *, max_concurrent_requests: int) -> None:
        self.engine = engine
        self._max_concurrent_requests = max_concurrent_requests
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[int, _Stream] = {}  # by request id; engine thread only
        self._open: dict[_Stream, None] = {}  # event loop only
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._is_stopping = False
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        """Start the thread; call it once."""
        self._loop = asyncio.get_running_loop()
        self.dead: asyncio.Future[Exception] = self._loop.create_future()
        self._thread.start()

    async def generate(self, request: Request) -> AsyncGenerator[SequenceEvent, None]:
        """The events of a request. Closing the generator frees its blocks before the next step.

        Raises QueueFullError, DrainingError, EngineDeadError or RequestTooLargeError before the first event,
        and whatever error the request ends with.
        """
        self._check_accepting()
        stream = _Stream(request)
        self._open[stream] = None
        self._idle.clear()
        self._commands.put(partial(self._add, stream))
        is_ended = False
        try:
            while not is_ended:
                event = await stream.events.get()
                is_ended = event.is_terminal
                if event.error is not None:
                    raise event.error
                yield event
        finally:
            if not is_ended:
                self._commands.put(partial(self._abort, stream))
            self._open.pop(stream, None)
            if not self._open:
                self._idle.set()

    def stats(self) -> EngineStats:
        """The load at this moment."""
        return self.engine.stats()

    @property
    def num_open_requests(self) -> int:
        """Requests accepted and not yet ended."""
        return len(self._open)

    def begin_drain(self) -> None:
        """Refuse new requests from now on."""
        self._is_draining = True

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the running ones; those left after timeout_s end with DrainingError.

        True if all of them ended by themselves.
        """
        self.begin_drain()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
            return True
        except TimeoutError:
            message = f"the server is shutting down and this request outlived --drain-timeout ({timeout_s:g} s)"
            for stream in list(self._open):
                self._commands.put(partial(self._abort, stream))
                stream.events.put_nowait(SequenceEvent(-1, error=DrainingError(message)))
            return False

    async def stop(self) -> None:
        """End the thread after the step it is in; streams still open end with EngineDeadError."""
        self._is_stopping = True
        self._commands.put(lambda: None)
        await asyncio.to_thread(self._thread.join)
        self._end_streams(EngineDeadError("the server has stopped"))

    def fail(self, error: Exception) -> None:
        """Count as dead, whatever the thread is waiting for."""
        self._die(error)

    def _check_accepting(self) -> None:
        if self.dead.done():
            raise EngineDeadError(f"the engine has failed: {self.dead.result()}")
        if self._is_draining or self._is_stopping:
            raise DrainingError("the server is shutting down; send the request to another one")
        if len(self._open) >= self._max_concurrent_requests:
            raise QueueFullError(
                f"{len(self._open)} requests are in the server, --max-concurrent-requests is "
                f"{self._max_concurrent_requests}; try again later"
            )

    # ---- on the engine thread

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._take_commands()
                events = self.engine.step() if self.engine.has_work() else []
                if events:
                    self._deliver(events)
        except Exception as error:
            self._call_in_loop(partial(self._die, error))

    def _take_commands(self) -> None:
        """Run all commands there are; wait for one if the engine has nothing to do."""
        if not self.engine.has_work():
            self._commands.get()()
        while not self._is_stopping:
            try:
                self._commands.get_nowait()()
            except queue.Empty:
                return

    def _add(self, stream: _Stream) -> None:
        try:
            stream.request_id = self.engine.add(stream.request)
        except Exception as error:
            self._call_in_loop(partial(stream.events.put_nowait, SequenceEvent(-1, error=error)))
            return
        self._streams[stream.request_id] = stream

    def _abort(self, stream: _Stream) -> None:
        if stream.request_id is not None and self._streams.pop(stream.request_id, None) is not None:
            self.engine.abort(stream.request_id)

    def _deliver(self, events: list[SequenceEvent]) -> None:
        deliveries = []
        for event in events:
            stream = self._streams[event.request_id]
            if event.is_terminal:
                del self._streams[event.request_id]
            deliveries.append((stream, event))

        def put_all() -> None:
            for stream, event in deliveries:
                stream.events.put_nowait(event)

        self._call_in_loop(put_all)

    def _call_in_loop(self, callback: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop is closed: nobody is left to hear it
            self._is_stopping = True

    # ---- on the event loop

    def _die(self, error: Exception) -> None:
        if not self.dead.done():
            self.dead.set_result(error)
        self._end_streams(EngineDeadError(f"the engine has failed: {type(error).__name__}: {error}"))

    def _end_streams(self, error: Exception) -> None:
        for stream in self._open:
            stream.events.put_nowait(SequenceEvent(-1, error=error))
