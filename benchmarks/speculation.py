"""What speculators bring, measured: `python benchmarks/speculation.py [--variants mlp,mlp:2]`.

Demo model, float32, greedy, one stream, through gRPC: a server without a speculator and one for each kind, all in the
same run, on prompts that no speculator was trained on: chats and plain text openings by hand, and held-out ones of the
kind that the demo's MLP was trained on (the first eight of its data with long answers). Every answer must be that of
the plain server. Ratios of tokens/s are medians over the rounds. Writes build/speculation.json.
"""

import argparse
import contextlib
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from server_process import running_server, timed_answer

from specserve.router_client.client import Client

ROUNDS = 5
NEW_TOKENS = 128
CHATS = [
    "Explain how a bicycle stays upright, in three sentences.",
    "What is the difference between a virus and a bacterium?",
    "Write a short poem about the sea in winter.",
    "How do I bake a simple loaf of bread?",
    "Write a Python function that checks if a word is a palindrome.",
]
OPENINGS = [
    "The history of the steam engine begins",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the river,",
]
HELD_OUT = json.loads((Path(__file__).parent / "held_out_prompts.json").read_text("utf-8"))
OUTPUT = Path("build") / "speculation.json"


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--variants", default="mlp,medusa", help="kind, or kind:fixed length; commas between")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--mlp", default="demo")
    parser.add_argument("--medusa", default="demo")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    variants: dict[str, tuple[str, ...]] = {"none": ()}
    for name in arguments.variants.split(","):
        kind, _, length = name.partition(":")
        flags = ("--speculator", kind, "--speculator-id", getattr(arguments, kind))
        variants[name] = (*flags, *(("--num-speculative-tokens", length, "--draft-length", "fixed") if length else ()))
    prompts = [[{"role": "user", "content": text}] for text in CHATS + HELD_OUT] + list(OPENINGS)
    places = {"chats": range(len(CHATS)), "held out": range(len(CHATS), len(CHATS + HELD_OUT))}
    places["openings"] = range(len(CHATS + HELD_OUT), len(prompts))
    results: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        clients = {
            name: stack.enter_context(Client(stack.enter_context(running_server(*flags)), timeout_s=300))
            for name, flags in variants.items()
        }
        speeds: dict[str, list[list[float]]] = {name: [] for name in variants}  # [round][prompt] tokens/s
        answers: dict[str, list[tuple[int, ...]]] = {name: [] for name in variants}
        for number in range(-1, arguments.rounds):  # the first is a warm-up
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
            for name in variants:
                speeds[name].append([])
            for prompt in prompts:
                for name, client in clients.items():
                    tokens, seconds, _ = timed_answer(client, prompt, {"max_new_tokens": arguments.new_tokens})
                    speeds[name][-1].append((len(tokens) - 1) / seconds if seconds else 0.0)
                    if number == 0:
                        answers[name].append(tokens)
        for name, client in clients.items():
            assert answers[name] == answers["none"], f"{name} changed an answer"
            info = client.info().speculator
            drafts = max(1, info.num_drafts)
            results[name] = {
                "acceptance": [count / drafts for count in info.accepted_per_position],
                "length": info.mean_acceptance_length or 1.0,
                "ratios": ratios(speeds[name][1:], speeds["none"][1:], range(len(prompts))),
                **{
                    kind: statistics.median(ratios(speeds[name][1:], speeds["none"][1:], where))
                    for kind, where in places.items()
                },
                "worst": min(
                    statistics.median(s[i] / p[i] for s, p in zip(speeds[name][1:], speeds["none"][1:], strict=True))
                    for i in range(len(prompts))
                ),
                "tokens/s": statistics.median(statistics.mean(speed) for speed in speeds[name][1:]),
            }
    report(results)


def ratios(speeds: list[list[float]], plain: list[list[float]], which: range) -> list[float]:
    """Of each round: seconds a token without, over seconds a token with, over the prompts taken together."""
    return [
        sum(1 / plain_round[i] for i in which) / sum(1 / round_[i] for i in which)
        for round_, plain_round in zip(speeds, plain, strict=True)
    ]


def report(results: dict[str, Any]) -> None:
    """Write the JSON and print the table."""
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(json.dumps(results, indent=1) + "\n")
    table = Table(
        "speculator", "tokens/s", "over none", "chats", "held out", "openings", "worst", "length", "acceptance"
    )
    for name, result in results.items():
        acceptance = " ".join(f"{value:.2f}" for value in result["acceptance"])
        kinds = (result[kind] for kind in ("chats", "held out", "openings"))
        numbers = (result["tokens/s"], statistics.median(result["ratios"]), *kinds, result["worst"], result["length"])
        table.add_row(name, *(f"{n:.2f}" for n in numbers), acceptance)
    Console().print(table)


if __name__ == "__main__":
    main()
