"""A server for benchmarks, as a process of its own, and what a client sees of it."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from specserve.router_client.client import Client
from specserve.router_client.types import Summary


@contextmanager
def running_server(*flags: str) -> Iterator[str]:
    """`specserve serve --model-id demo` on a free port of this machine; its address."""
    local = ["--model-id", "demo", "--hostname", "127.0.0.1", "--port", "0"]
    command = [sys.executable, "-m", "specserve.server", "serve", *local, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if match := re.search(r"is ready at (\S+): ", line):
                yield match[1]
                break
        else:
            raise SystemExit("the server did not start")
    finally:
        process.terminate()
        process.wait()


def timed_answer(client: Client, prompt: Any, options: dict[str, Any]) -> tuple[tuple[int, ...], float, Summary]:
    """Tokens, seconds behind the first token, and the summary."""
    tokens: list[int] = []
    first = last = 0.0
    summary = None
    for event in client.stream(prompt, **options):
        last = time.perf_counter()
        first = first or last
        tokens += event.token_ids
        summary = event.summary
    assert summary is not None
    return tuple(tokens), last - first, summary
