"""What a draft model of another tokenizer brings, measured: `python benchmarks/usd.py gemma-3-270m.gguf [--rounds 5]`.

Target Gemma-3-270M (float32), draft SmolLM2-135M (int8), on openings of prose, code and lists, through gRPC: a server
without a speculator and one with usd, in the same run, for one stream and for eight at once, greedy and sampled. Every
answer must be that of the plain server. Ratios are of seconds a token behind the first one, medians over the rounds.
Writes build/usd.json.
"""

import argparse
import concurrent.futures
import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from server_process import running_server, timed_answer

from specserve.router_client.client import Client

PROMPTS = [
    "The history of the steam engine begins",
    "Once upon a time, in a small village by the river,",
    "The capital of France is",
    "Photosynthesis is the process by which",
    "The main difference between a virus and a bacterium is",
    "In the year 1969, the first",
    "She opened the door and",
    "The weather in the mountains can change quickly, so",
    "Dear customer,\n\nthank you for",
    "Water boils at",
    "def fibonacci(n):\n",
    "import numpy as np\n\ndef mean(",
    "class Stack:\n    def __init__(self):\n",
    "SELECT name, age FROM users WHERE",
    '{"name": "Alice", "age": 30, "city":',
    "for (int i = 0; i < n; i++) {\n",
    "Recipe for pancakes:\n\nIngredients:\n",
    "How to make a paper plane:\n\n1.",
    "1, 2, 3, 4, 5,",
    "Q: What is the largest planet?\nA:",
]
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "1 stream, greedy": (1, {}),
    "1 stream, temperature 0.8": (1, {"temperature": 0.8, "seed": 7}),
    "8 streams, greedy": (8, {}),
    "8 streams, temperature 0.8": (8, {"temperature": 0.8, "seed": 7}),
}
OUTPUT = Path("build") / "usd.json"


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="the .gguf file of Gemma-3-270M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--modes", default="", help="only those with this in their names")
    parser.add_argument("--usd-flags", default="--speculator usd --speculator-id demo")
    arguments = parser.parse_args()
    base = ("--model-id", arguments.model, "--max-total-tokens", "1024")
    results: dict[str, Any] = {}
    with (
        running_server(*base) as plain_address,
        running_server(*base, *arguments.usd_flags.split()) as usd_address,
        Client(plain_address, timeout_s=300) as plain,
        Client(usd_address, timeout_s=300) as usd,
    ):
        for mode, (num_streams, sampling) in MODES.items():
            if arguments.modes in mode:
                options = {"max_new_tokens": arguments.new_tokens, "ignore_eos": True, **sampling}
                clients = {"plain": plain, "usd": usd}
                results[mode] = measure(mode, clients, num_streams, options, arguments.rounds)
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(json.dumps(results, indent=1) + "\n")
    report(results)


def measure(
    mode: str, clients: dict[str, Client], num_streams: int, options: dict[str, Any], num_rounds: int
) -> dict[str, Any]:
    """All prompts, num_streams at once, by each client in turn, in a round of warm-up and num_rounds that count."""
    seconds: dict[str, list[list[float]]] = {
        name: [[] for _ in PROMPTS] for name in clients
    }  # a token, [prompt][round]
    drafted = [(0, 0)] * len(PROMPTS)  # and accepted
    with concurrent.futures.ThreadPoolExecutor(num_streams) as pool:
        for number, begin in itertools.product(range(num_rounds + 1), range(0, len(PROMPTS), num_streams)):
            if begin == 0:
                print(f"{mode}: round {number} of {num_rounds}", file=sys.stderr, flush=True)
            some = range(begin, min(begin + num_streams, len(PROMPTS)))
            answers = {}
            for name, client in clients.items():
                jobs = [pool.submit(timed_answer, client, PROMPTS[index], options) for index in some]
                answers[name] = [job.result() for job in jobs]
            for place, index in enumerate(some):
                tokens, _, summary = answers["usd"][place]
                assert tokens == answers["plain"][place][0], f"usd changed the answer to {PROMPTS[index]!r}"
                if number > 0:
                    for name in clients:
                        seconds[name][index].append(answers[name][place][1] / max(1, len(tokens) - 1))
                    counts = (summary.drafted_tokens, summary.accepted_tokens)
                    drafted[index] = (drafted[index][0] + counts[0], drafted[index][1] + counts[1])
    return summarize(seconds, drafted)


def summarize(seconds: dict[str, list[list[float]]], drafted: list[tuple[int, int]]) -> dict[str, Any]:
    """Ratios of one mode: over all prompts, and of each."""
    rounds = range(len(seconds["plain"][0]))
    totals = [sum(s[i] for s in seconds["plain"]) / sum(s[i] for s in seconds["usd"]) for i in rounds]
    each = [
        statistics.median(a / b for a, b in zip(*pair, strict=True))
        for pair in zip(seconds["plain"], seconds["usd"], strict=True)
    ]
    return {
        "tokens/s": 1 / statistics.median(second for prompt in seconds["plain"] for second in prompt),
        "over plain": statistics.median(totals),
        "each": {
            prompt: {"over plain": ratio, "drafted": counts[0], "accepted": counts[1]}
            for prompt, ratio, counts in zip(PROMPTS, each, drafted, strict=True)
        },
    }


def report(results: dict[str, Any]) -> None:
    """The table."""
    table = Table("mode", "plain, tokens/s a stream", "over plain", "worst prompt", "best prompt", "drafts accepted")
    for mode, result in results.items():
        ratios = [prompt["over plain"] for prompt in result["each"].values()]
        drafted, accepted = (sum(p[key] for p in result["each"].values()) for key in ("drafted", "accepted"))
        numbers = (result["tokens/s"], result["over plain"], min(ratios), max(ratios), accepted / max(1, drafted))
        table.add_row(mode, *(f"{number:.2f}" for number in numbers))
    Console().print(table)


if __name__ == "__main__":
    main()
