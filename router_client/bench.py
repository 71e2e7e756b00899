"""The arithmetic of `specserve bench`: arrivals, prompts, what was measured, and the report.

How things are counted:
- Time to first token, latency: from the moment when a request was due (open loop) or sent (closed loop), so a
  client that falls behind an open loop's arrivals can't hide it.
- Time between tokens: an event with n tokens that comes t seconds after the event before counts as n times t/n.
  The tokens of the first event have no time between them. Events without tokens are passed over.
- Throughput: generated tokens (requests) of completed requests over the time from the first due to the last end.
"""

import json
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from specserve.router_client.types import Prompt, ServerInfo, Summary

PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class RequestRecord:
    """What was seen of one request; moments in seconds on one monotonic clock."""

    started_at: float
    token_events: list[tuple[float, int]] = field(default_factory=list)  # (moment, tokens), tokens >= 1
    ended_at: float = math.nan
    summary: Summary | None = None
    error: str | None = None  # the name of the status code

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds; None if no token came."""
        return self.token_events[0][0] - self.started_at if self.token_events else None

    @property
    def latency(self) -> float:
        """Seconds from start to end."""
        return self.ended_at - self.started_at

    def times_between_events(self) -> list[tuple[float, int]]:
        """(seconds since the event before, tokens) of each event with tokens but the first."""
        moments = [moment for moment, _ in self.token_events]
        return [
            (after - before, tokens)
            for before, after, (_, tokens) in zip(moments, moments[1:], self.token_events[1:], strict=False)
        ]

    def times_between_tokens(self) -> list[float]:
        """Seconds between tokens, as counted in the module's docstring."""
        return [seconds / tokens for seconds, tokens in self.times_between_events() for _ in range(tokens)]


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The value below which `percent` (0..100) of the values are, linear between neighbours; None for no values."""
    if not 0 <= percent <= 100:
        raise ValueError(f"percent is {percent}; it must be in 0..100")
    if not values:
        return None
    ordered = sorted(values)
    position = percent / 100 * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def poisson_arrivals(rate: float, num_requests: int, seed: int) -> list[float]:
    """Moments (seconds from the start) of arrivals at `rate` a second: the gaps are exponential."""
    if not 0 < rate < math.inf:
        raise ValueError(f"rate is {rate}; it must be > 0 requests a second")
    generator = random.Random(seed)
    moments, now = [], 0.0
    for _ in range(num_requests):
        now += generator.expovariate(rate)
        moments.append(now)
    return moments


def synthetic_prompts(info: ServerInfo, input_tokens: int, count: int, seed: int) -> list[list[int]]:
    """`count` prompts of `input_tokens` random ids of the server's model, without its EOS ids.

    No two begin with the same token (while the vocabulary lasts), so none finds another's prefix in the cache.
    """
    if not 1 <= input_tokens <= info.max_input_tokens:
        raise ValueError(f"input_tokens is {input_tokens}; this server takes 1..{info.max_input_tokens}")
    generator = random.Random(seed)
    ids = sorted(set(range(info.vocab_size)) - set(info.eos_token_ids))
    firsts = generator.sample(ids, len(ids))
    return [[firsts[i % len(ids)], *generator.choices(ids, k=input_tokens - 1)] for i in range(count)]


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file: `.jsonl` has an object with "text", "token_ids" or "chat" a line, else a line is a text.

    Blank lines are passed over.

    Raises:
        ValueError: an unreadable file or line, or no prompt at all.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompt file {path}: {error}") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ValueError(f"prompt file {path}: has no prompts")
    if path.suffix != ".jsonl":
        return [line.removesuffix("\r") for _, line in numbered]
    return [_json_prompt(f"prompt file {path}, line {number}", line) for number, line in numbered]


def _json_prompt(where: str, line: str) -> Prompt:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error}") from None
    if isinstance(value, dict) and len(value) == 1:
        match value:
            case {"text": str(text)}:
                return text
            case {"token_ids": list(items)} | {"chat": list(items)}:
                return items  # the items are checked where the request is built
    raise ValueError(f'{where}: must be an object with a string "text", or a list "token_ids" or "chat", and no more')


def _distribution(values: Sequence[float]) -> dict[str, float | None]:
    mean = math.fsum(values) / len(values) if values else None
    return {"mean": mean, **{f"p{percent}": percentile(values, percent) for percent in PERCENTILES}}


def report(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """What the records say, ready for JSON: times in seconds, rates a second, None where there is nothing to say."""
    completed = [record for record in records if record.summary is not None]
    summaries = [record.summary for record in records if record.summary is not None]
    duration = max((r.ended_at for r in records), default=0.0) - min((r.started_at for r in records), default=0.0)
    output_tokens = sum(summary.generated_tokens for summary in summaries)
    drafted = sum(summary.drafted_tokens for summary in summaries)
    accepted = sum(summary.accepted_tokens for summary in summaries)
    num_drafts = sum(summary.num_drafts for summary in summaries)
    per_position = [sum(column) for column in zip_longest(*(s.accepted_per_position for s in summaries), fillvalue=0)]
    first_tokens = [record.time_to_first_token for record in completed]
    return {
        "requests": len(records),
        "completed": len(completed),
        "errors": dict(sorted(Counter(record.error for record in records if record.error).items())),
        "finish_reasons": dict(sorted(Counter(str(summary.finish_reason) for summary in summaries).items())),
        "duration_seconds": duration,
        "prompt_tokens": sum(summary.prompt_tokens for summary in summaries),
        "cached_prompt_tokens": sum(summary.cached_prompt_tokens for summary in summaries),
        "output_tokens": output_tokens,
        "output_tokens_per_second": output_tokens / duration if duration > 0 else None,
        "requests_per_second": len(completed) / duration if duration > 0 else None,
        "time_to_first_token_seconds": _distribution([seconds for seconds in first_tokens if seconds is not None]),
        "time_between_tokens_seconds": _distribution(list(_chain_tokens(completed))),
        "time_between_events_seconds": _distribution(
            [seconds for record in completed for seconds, _ in record.times_between_events()]
        ),
        "latency_seconds": _distribution([record.latency for record in completed]),
        "drafted_tokens": drafted,
        "accepted_tokens": accepted,
        "acceptance_rate": accepted / drafted if drafted else None,
        "accepted_per_position": per_position,
        "mean_acceptance_length": 1 + accepted / num_drafts if num_drafts else None,
    }


def _chain_tokens(records: Sequence[RequestRecord]) -> Iterator[float]:
    for record in records:
        yield from record.times_between_tokens()
