"""What the client commands show to people."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from rich.table import Table

from specserve.router_client.bench import PERCENTILES
from specserve.router_client.types import ServerInfo, SpeculatorInfo, Summary


def summary_line(summary: Summary, seconds: float, first_token_seconds: float | None) -> str:
    """One line about a generation as the client saw it; the rate counts all of the call, the prompt too."""
    parts = [
        f"{summary.generated_tokens} tokens in {seconds:.2f} s",
        f"{summary.generated_tokens / seconds:.1f} tokens/s",
        f"finish reason: {summary.finish_reason}",
    ]
    if first_token_seconds is not None:
        parts.append(f"time to first token: {first_token_seconds:.3f} s")
    if summary.drafted_tokens:
        parts.append(f"accepted drafts: {summary.accepted_tokens}/{summary.drafted_tokens}")
        if summary.mean_acceptance_length is not None:
            parts.append(f"mean acceptance length: {summary.mean_acceptance_length:.2f}")
    return ", ".join(parts)


def info_table(info: ServerInfo) -> Table:
    """All that a server says of itself."""
    table = Table(show_header=False)
    for item in fields(ServerInfo):
        value = getattr(info, item.name)
        if isinstance(value, SpeculatorInfo):
            for part in fields(SpeculatorInfo):
                table.add_row(f"speculator {part.name.replace('_', ' ')}", _shown(getattr(value, part.name)))
        else:
            table.add_row(item.name.replace("_", " "), _shown(value))
    return table


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def report_tables(report: Mapping[str, Any]) -> list[Table]:
    """The report of bench.py: totals, and the distributions in milliseconds."""
    totals = Table(show_header=False)
    totals.add_row("completed requests", f"{report['completed']} of {report['requests']}")
    for code, count in report["errors"].items():
        totals.add_row(f"failed: {code}", str(count))
    for reason, count in report["finish_reasons"].items():
        totals.add_row(f"finished: {reason}", str(count))
    totals.add_row("duration, s", _number(report["duration_seconds"], 2))
    totals.add_row("prompt tokens", str(report["prompt_tokens"]))
    totals.add_row("output tokens", str(report["output_tokens"]))
    totals.add_row("output tokens/s", _number(report["output_tokens_per_second"]))
    totals.add_row("requests/s", _number(report["requests_per_second"], 2))
    if report["drafted_tokens"]:
        drafts = f"{report['accepted_tokens']} of {report['drafted_tokens']} ({report['acceptance_rate']:.1%})"
        totals.add_row("accepted drafts", drafts)
        totals.add_row("accepted per position", ", ".join(map(str, report["accepted_per_position"])))
        totals.add_row("mean acceptance length", _number(report["mean_acceptance_length"], 2))

    times = Table("milliseconds", "mean", *(f"p{percent}" for percent in PERCENTILES))
    for label, key in (
        ("time to first token", "time_to_first_token_seconds"),
        ("time between tokens", "time_between_tokens_seconds"),
        ("time between events", "time_between_events_seconds"),
        ("request latency", "latency_seconds"),
    ):
        values = (report[key][column] for column in ("mean", *(f"p{percent}" for percent in PERCENTILES)))
        times.add_row(label, *(_number(None if value is None else 1000 * value, 2) for value in values))
    return [totals, times]
