"""Signs of life between the ranks, so that the end or the standstill of one ends all of them.

Collectives tell too little: NCCL waits for a dead rank, as shared memory does, and nothing tells of one that hangs. So
each rank writes a line to the launcher's store a few times a second, and reads those of the others: rank 0 of all, the
others of rank 0. It stands still who is in a step without any collective begun for as long.
"""

import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # not declared

from specserve.server.place import RankPlace
from specserve.server.worker.errors import RankError

BEAT_S = 0.25
_FAILURE, _ENDED = "failure", "ended"


class Monitor:
    """Watches from `start` on. `failure` is set once, when something is wrong with any rank."""

    def __init__(self, place: RankPlace, timeout_s: float) -> None:
        self.failure: concurrent.futures.Future[RankError] = concurrent.futures.Future()
        self.on_end: Callable[[], None] = lambda: None  # rank 0 has ended as it should
        self._place, self._timeout_s = place, timeout_s
        self._progress: Callable[[], int] = lambda: 0
        self._in_step = False
        self._store = PrefixStore("specserve/monitor", _connect(place, timeout_s))
        self._is_watching = True
        self._last_beat = time.monotonic()
        self._lock = threading.Lock()
        now = time.monotonic()
        others = range(1, place.size) if place.rank == 0 else [0]
        self._heard: dict[int, tuple[str, float]] = dict.fromkeys(others, ("", now))
        self._standstill = (0, now)  # progress, and since when

    def start(self, progress: Callable[[], int]) -> None:
        """Begin; `progress` counts collectives. All ranks do so before the first one can be missed."""
        self._progress = progress
        for target in (self._beat, self._watch_store):
            threading.Thread(target=target, name="monitor", daemon=True).start()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step: progress is expected."""
        self._standstill = (self._progress(), time.monotonic())
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def explain(self, error: Exception) -> Exception:
        """What is behind an error of a group: the failure of another rank, if it comes out in time. Else the error."""
        if not isinstance(error, DistError) and "gloo" not in str(error):
            return error
        try:
            return self.failure.result(self._timeout_s + 2 * BEAT_S)
        except concurrent.futures.TimeoutError:
            return error

    def report(self, error: str) -> None:
        """Let the others know why this rank ends."""
        self._tell(_FAILURE, f"rank {self._place.rank}: {error}")

    def end(self) -> None:
        """Rank 0 ends as it should, and so may the others."""
        self._tell(_ENDED, "yes")

    def has_ended(self) -> bool:
        """Whether rank 0 has ended as it should."""
        try:
            return bool(self._store.check([_ENDED]))
        except RuntimeError:
            return False

    def _tell(self, key: str, text: str) -> None:
        self._is_watching = False
        try:
            with self._lock:
                if not self._store.check([_FAILURE]):
                    self._store.set(key, text)
        except RuntimeError:
            pass  # nobody is left to hear it

    def _beat(self) -> None:
        count = 0
        while self._is_watching:
            count += 1
            try:
                with self._lock:
                    problem = self._exchange(f"{count} {int(self._in_step)} {self._progress()}")
            except RuntimeError as error:  # of the store
                problem = f"the launcher doesn't answer any more ({str(error).splitlines()[0]})"
            self._last_beat = time.monotonic()
            if problem:
                self._fail(problem)
            time.sleep(BEAT_S)

    def _exchange(self, line: str) -> str | None:
        """What is wrong, if anything."""
        store, place = self._store, self._place
        store.set(f"beat/{place.rank}", line)
        if store.check([_FAILURE]):
            return store.get(_FAILURE).decode()
        if store.check([_ENDED]):
            self._is_watching = False
            self.on_end()
            return None
        now = time.monotonic()
        for rank, (last, since) in self._heard.items():
            heard = store.get(f"beat/{rank}").decode() if store.check([f"beat/{rank}"]) else ""
            if heard != last or not heard:
                self._heard[rank] = (heard, now)
            elif now - since > self._timeout_s:
                return f"rank {rank} gave no sign of life for {now - since:.1f} s"
        return self._find_standstill(now)

    def _find_standstill(self, now: float) -> str | None:
        progress, since = self._standstill
        current = self._progress()
        if not self._in_step or current != progress:
            self._standstill = (current, now)
            return None
        if now - since <= self._timeout_s:
            return None
        others = {rank: int(line.split()[2]) for rank, (line, _) in self._heard.items() if line}
        behind = min(others, key=others.__getitem__, default=self._place.rank)
        who = behind if others.get(behind, current) < current else self._place.rank
        return f"no progress for {now - since:.1f} s in a step, rank {who} is behind"

    def _watch_store(self) -> None:
        while self._is_watching:
            silent = time.monotonic() - self._last_beat
            if silent > self._timeout_s + 2.0:
                self._fail(f"the launcher's store has not answered for {silent:.1f} s")
            time.sleep(BEAT_S)

    def _fail(self, problem: str) -> None:
        was_watching, self._is_watching = self._is_watching, False
        if was_watching and not self.failure.done():
            with suppress(RuntimeError):
                self._store.set(_FAILURE, problem)
            self.failure.set_result(RankError(problem))


def _connect(place: RankPlace, timeout_s: float) -> Store:
    """A connection of its own: one that waits would keep the others waiting."""
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(place.store_host, place.store_port, is_master=False, wait_for_workers=False, timeout=timeout)
