"""The speed bars, measured: `make bench`.

Demo model, float32, greedy, 128 new tokens. Everything is measured in rounds, so that a bar compares figures of
the same seconds of the same machine; ratios are medians over the rounds. Writes build/bench.json.
"""

import asyncio
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from server_process import running_server
from transformers import AutoModelForCausalLM, GgufConfig

from specserve.models.hub import resolve_model
from specserve.models.sampling.params import SamplingParams
from specserve.router_client.aio_client import AioClient
from specserve.server.config import ModelOptions, ServerConfig
from specserve.server.engine.engine import Engine
from specserve.server.engine.sequence import Request
from specserve.server.launch import build
from specserve.server.stopping import StoppingParams, StopTextStream

NEW_TOKENS = 128
ROUNDS = 5
STREAMS = 16
MESSAGES = [{"role": "user", "content": "Explain how a bicycle stays upright, in three sentences."}]
OUTPUT = Path("build") / "bench.json"


class InProcess:
    """The engine without gRPC, and the bare matmuls of its model."""

    def __init__(self) -> None:
        serving = build(ServerConfig(model=ModelOptions("demo")))
        self.engine: Engine = serving.engine.engine  # type: ignore[attr-defined]
        self.tokenizer = serving.tokenizer
        text = serving.chat_template.render(MESSAGES)
        self.prompt = serving.tokenizer.encode(text, add_special_tokens=False)
        model = self.engine.executor.model  # type: ignore[attr-defined]
        self.weights = [
            [
                torch.randn(linear.matrix.shape)
                for linear in (
                    *(layer.self_attn.qkv_proj, layer.self_attn.o_proj),
                    *(layer.mlp.gate_up_proj, layer.mlp.down_proj),
                )
            ]
            for layer in model.layers
        ]
        self.head = torch.randn(model.head.matrix.shape)

    def run(self, num_streams: int) -> tuple[float, list[float]]:
        """(tokens/s, seconds of the steps that decode all streams)."""
        for index in range(num_streams):
            stopping = StoppingParams(
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=0,
                stop_strings=(),
                stop_token_ids=frozenset(),
                eos_token_ids=frozenset(),
            )
            # A different first token each: nothing is shared through the prefix cache.
            prompt = [1000 + index, *self.prompt]
            self.engine.add(Request(prompt, SamplingParams(), StopTextStream(self.tokenizer, stopping), NEW_TOKENS))
        steps = []
        start = time.perf_counter()
        while self.engine.has_work():
            before = time.perf_counter()
            events = self.engine.step()
            if len(events) == num_streams and all(event.generated_tokens > 1 for event in events):
                steps.append(time.perf_counter() - before)
        return num_streams * NEW_TOKENS / (time.perf_counter() - start), steps

    @torch.inference_mode()
    def floor(self, num_rows: int, repeat: int = 15) -> float:
        """Median seconds of nothing but the weight matmuls of one step."""

        def chain(x: torch.Tensor) -> None:
            for qkv, out, gate_up, down in self.weights:
                x = F.linear(x, qkv)[:, : out.shape[1]]
                x = F.linear(F.linear(x, out), gate_up)[:, : down.shape[1]]
                x = F.linear(x, down) * 1e-3
            F.linear(x, self.head)

        x = torch.randn(num_rows, self.head.shape[1])
        times = []
        for _ in range(repeat):
            start = time.perf_counter()
            chain(x)
            times.append(time.perf_counter() - start)
        return statistics.median(times)


def load_transformers() -> Any:
    """The demo model in transformers, float32."""
    path = resolve_model("demo").path
    auto_model: Any = AutoModelForCausalLM  # its from_pretrained is not typed
    options = {"dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
    return auto_model.from_pretrained(path.parent, gguf_file=path.name, **options).eval()


@torch.inference_mode()
def run_transformers(model: Any, prompt: list[int]) -> float:
    """Tokens/s of `generate`, one stream."""
    ids = torch.tensor([prompt])
    lengths = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    start = time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **lengths)
    return NEW_TOKENS / (time.perf_counter() - start)


async def run_grpc(address: str, prompt: list[int], num_streams: int) -> float:
    """Tokens/s over num_streams concurrent streams."""
    async with AioClient(address, timeout_s=300) as client:

        async def one(index: int) -> int:
            options = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
            events = client.stream([1000 + index, *prompt], **options)
            return sum([len(event.token_ids) async for event in events])

        await client.wait_until_ready()
        start = time.perf_counter()
        counts = await asyncio.gather(*(one(index) for index in range(num_streams)))
        return sum(counts) / (time.perf_counter() - start)


def measure(address: str) -> dict[str, list[float]]:
    """Figure -> its value in each round, after one warm-up round."""
    local, reference = InProcess(), load_transformers()
    local.run(1), run_transformers(reference, local.prompt), asyncio.run(run_grpc(address, local.prompt, 1))
    figures: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        figures.setdefault(name, []).append(value)

    for number in range(ROUNDS):
        print(f"round {number + 1} of {ROUNDS}", file=sys.stderr, flush=True)
        note("transformers, 1 stream, tokens/s", run_transformers(reference, local.prompt))
        for streams in (1, STREAMS):
            note(f"gRPC, {streams} stream(s), tokens/s", asyncio.run(run_grpc(address, local.prompt, streams)))
            before = local.floor(streams)
            tokens_per_s, steps = local.run(streams)
            note(f"engine, {streams} stream(s), tokens/s", tokens_per_s)
            note(f"step, {streams} row(s), ms", 1e3 * statistics.median(steps))
            note(f"matmul floor, {streams} row(s), ms", 1e3 * (before + local.floor(streams)) / 2)
    return figures


def bars(figures: dict[str, list[float]]) -> list[tuple[str, float, str, float]]:
    """(what, measured ratio, comparison, bar)."""

    def ratio(over: str, under: str) -> float:
        return statistics.median(a / b for a, b in zip(figures[over], figures[under], strict=True))

    many, one = f"gRPC, {STREAMS} stream(s), tokens/s", "gRPC, 1 stream(s), tokens/s"
    step_bars = [
        (f"step / matmul floor, {n} row(s)", ratio(f"step, {n} row(s), ms", f"matmul floor, {n} row(s), ms"), "<=", 1.4)
        for n in (1, STREAMS)
    ]
    return [
        ("one gRPC stream / transformers generate", ratio(one, "transformers, 1 stream, tokens/s"), ">=", 1.7),
        *step_bars,
        (f"{STREAMS} gRPC streams / one", ratio(many, one), ">=", 5.0),
        ("gRPC / engine, 1 stream", ratio(one, "engine, 1 stream(s), tokens/s"), ">=", 0.93),
        (f"gRPC / engine, {STREAMS} streams", ratio(many, f"engine, {STREAMS} stream(s), tokens/s"), ">=", 0.93),
    ]


def report(figures: dict[str, list[float]]) -> None:
    """Print the tables and write the JSON."""
    holds: dict[str, Callable[[float, float], bool]] = {">=": float.__ge__, "<=": float.__le__}
    console = Console()
    table = Table("figure", "median", "min", "max", title=f"{platform.processor() or platform.machine()}, fp32")
    for name, values in figures.items():
        table.add_row(name, *(f"{value:.2f}" for value in (statistics.median(values), min(values), max(values))))
    console.print(table)
    results = bars(figures)
    table = Table("bar", "measured", "wanted", "holds")
    for name, value, comparison, bar in results:
        table.add_row(name, f"{value:.2f}", f"{comparison} {bar:g}", "yes" if holds[comparison](value, bar) else "NO")
    console.print(table)
    OUTPUT.parent.mkdir(exist_ok=True)
    machine = {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    ratios = {name: value for name, value, _, _ in results}
    OUTPUT.write_text(json.dumps({"machine": machine, "figures": figures, "ratios": ratios}, indent=1) + "\n")
    console.print(f"written to {OUTPUT}")


if __name__ == "__main__":
    with running_server() as server_address:
        report(measure(server_address))
