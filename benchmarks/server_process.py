"""A server for benchmarks, as a process of its own."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


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
