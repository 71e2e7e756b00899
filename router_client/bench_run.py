"""One run of `specserve bench`, from its settings to its report."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc

from specserve.router_client.aio_client import AioClient
from specserve.router_client.bench import poisson_arrivals, read_prompts, report, synthetic_prompts
from specserve.router_client.load import LoadRequest, Progress, closed_loop, ignore_progress, open_loop
from specserve.router_client.retry import RetryPolicy
from specserve.router_client.types import GenerateOptions, Prompt, ServerInfo

DEFAULT_INPUT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What to send: `concurrency` at a time (1 if neither is given) or `rate` a second; from a file or synthetic."""

    concurrency: int | None = None
    rate: float | None = None
    num_requests: int = 16
    warmup: int = 1
    prompt_file: Path | None = None
    input_tokens: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.rate is not None:
            raise ValueError("--concurrency and --rate exclude each other; give one")
        if self.prompt_file is not None and self.input_tokens is not None:
            raise ValueError("--prompt-file and --input-tokens exclude each other; give one")

    def prompts(self, info: ServerInfo) -> list[Prompt]:
        """Prompts of the warm-up and then of the measured requests; those of a file repeat."""
        count = self.warmup + self.num_requests
        if self.prompt_file is None:
            return list(synthetic_prompts(info, self.input_tokens or DEFAULT_INPUT_TOKENS, count, self.seed))
        prompts = read_prompts(self.prompt_file)
        return [prompts[i % len(prompts)] for i in range(count)]


async def run_bench(
    settings: BenchSettings,
    options: GenerateOptions,
    *,
    targets: Sequence[str],
    credentials: grpc.ChannelCredentials | None = None,
    timeout_s: float | None = None,
    progress: Progress = ignore_progress,
) -> dict[str, Any]:
    """Send the requests and return the report of bench.py with the settings, the options and the server's info.

    Nothing is retried, so that every refusal is counted. `progress` is called with each measured record.

    Raises:
        ValueError: settings or a prompt that can't be used.
        SpecserveError: the server can't be asked for its info.
    """
    # Settings that can't be used are refused before the first call.
    arrivals = None if settings.rate is None else poisson_arrivals(settings.rate, settings.num_requests, settings.seed)
    concurrency = settings.concurrency or 1
    retry = RetryPolicy(max_attempts=1)
    async with AioClient(targets, credentials=credentials, timeout_s=timeout_s, retry=retry) as client:
        info = await client.info()
        requests: list[LoadRequest] = []
        for index, prompt in enumerate(settings.prompts(info)):
            seed = (settings.seed + index) % 2**64
            requests.append((prompt, {**options, "seed": seed}))
        warmup = await closed_loop(client, requests[: settings.warmup], concurrency)
        measured = requests[settings.warmup :]
        if arrivals is None:
            records = await closed_loop(client, measured, concurrency, progress)
        else:
            records = await open_loop(client, measured, arrivals, progress)
    return report(records) | {
        "warmup_errors": dict(Counter(record.error for record in warmup if record.error)),
        "settings": asdict(settings)
        | {
            "concurrency": None if arrivals else concurrency,
            "prompt_file": None if settings.prompt_file is None else str(settings.prompt_file),
        },
        "options": {name: value for name, value in options.items() if name != "seed"},
        "server": asdict(info),
    }
