"""Servers as processes, and what runs below them."""

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

READY = re.compile(r"specserve is ready at (\S+): model (\S+), (\d+) KV tokens")
START_SECONDS = 120
SERVE = ("specserve.server", "serve")


class ServerProcess:
    """`specserve serve` as a process of its own; its output is kept for messages of failed tests."""

    def __init__(self, *args: str, env: dict[str, str] | None = None, module: Sequence[str] = SERVE) -> None:
        command = [sys.executable, "-m", *module, *args]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_ready(self, seconds: float = START_SECONDS) -> str:
        """The address, once the server says that it is ready."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for line in self.lines:
                if match := READY.search(line):
                    return match[1]
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.output}"
            time.sleep(0.05)
        raise AssertionError(f"not ready after {seconds} s:\n{self.output}")

    def wait_exit(self, seconds: float = START_SECONDS) -> int:
        """The exit code."""
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code

    def terminate(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        """Make sure that it is gone."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def children(pid: int) -> list[int]:
    """Of a process, and theirs."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text().split():
                found += [int(child), *children(int(child))]
    return found


def rank_pids(pid: int) -> dict[int, int]:
    """Rank -> process, of a launcher."""
    pids = {}
    for child in children(pid):
        with contextlib.suppress(OSError):
            for item in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                if item.startswith(b"RANK="):
                    pids.setdefault(int(item[5:]), child)
    return pids


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_gone(pids, seconds):
    deadline = time.monotonic() + seconds
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, f"still running: {[pid for pid in pids if is_running(pid)]}"
        time.sleep(0.05)
