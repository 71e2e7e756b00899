"""What splitting the demo model over two processes costs: `python benchmarks/tensor_parallel.py [--rounds 5]`.

One stream, greedy, through gRPC, on two cores: two ranks with a thread each against one process with two threads,
which reads half of the weights on each core as well, and against one process with one thread. Seconds a token behind
the first one; medians over the rounds, in which the servers take turns. Writes build/tensor_parallel.json.
"""

import argparse
import contextlib
import json
import statistics
from pathlib import Path

from rich.console import Console
from rich.table import Table
from server_process import running_server, timed_answer

from specserve.router_client.client import Client

SERVERS = {
    "1 process, 2 threads": ("--num-threads", "2"),
    "1 process, 1 thread": ("--num-threads", "1"),
    "2 ranks, 1 thread each": ("--num-shard", "2"),
}
PROMPT = "The history of the steam engine begins"
OUTPUT = Path("build") / "tensor_parallel.json"


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-id", default="demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=128)
    arguments = parser.parse_args()
    options = {"max_new_tokens": arguments.new_tokens, "ignore_eos": True}
    seconds: dict[str, list[float]] = {name: [] for name in SERVERS}
    tokens = set()
    with contextlib.ExitStack() as stack:
        clients = {}
        for name, flags in SERVERS.items():
            address = stack.enter_context(running_server("--model-id", arguments.model_id, *flags))
            clients[name] = stack.enter_context(Client(address, timeout_s=300))
        for number in range(arguments.rounds + 1):
            for name, client in clients.items():
                answer, elapsed, _ = timed_answer(client, PROMPT, options)
                tokens.add(answer)
                if number > 0:
                    seconds[name].append(elapsed / (arguments.new_tokens - 1))
    assert len(tokens) == 1, "all servers must give the same tokens"
    base = seconds["1 process, 2 threads"]
    results = {
        name: {
            "ms a token": 1000 * statistics.median(values),
            "over 1 process, 2 threads": statistics.median(a / b for a, b in zip(values, base, strict=True)),
        }
        for name, values in seconds.items()
    }
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(json.dumps(results, indent=1) + "\n")
    table = Table("server", "ms a token", "over 1 process, 2 threads")
    for name, result in results.items():
        table.add_row(name, *(f"{number:.3f}" for number in result.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
