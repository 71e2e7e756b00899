"""The commands generate, info and bench."""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from specserve.router_client import cli_options as opt
from specserve.router_client.bench_run import BenchSettings, run_bench
from specserve.router_client.client import Client
from specserve.router_client.errors import SpecserveError
from specserve.router_client.tables import info_table, report_tables, summary_line
from specserve.router_client.types import GenerateOptions, Prompt

EXIT_INTERRUPTED = 130  # as shells report SIGINT


def register(app: typer.Typer) -> None:
    """Add the client's commands to an app."""
    app.command()(generate)
    app.command()(info)
    app.command()(bench)


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """Ends the command with one line on stderr where a call fails or an argument can't be used."""
    try:
        yield
    except (SpecserveError, ValueError) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("cancelled", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _client(context: typer.Context) -> Client:
    timeout_s = context.params["timeout"]
    return Client(opt.targets(context), credentials=opt.credentials(context), timeout_s=timeout_s)


def generate(
    context: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="The text; '-' or nothing: read it from stdin.")] = None,
    target: opt.Targets = None,
    port: opt.Port = opt.DEFAULT_PORT,
    tls: opt.Tls = False,
    tls_ca: opt.TlsCa = None,
    timeout: opt.Timeout = None,
    chat: Annotated[
        bool | None, typer.Option(help="Send a user's message, or the bare text. Default: as the model is made.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message of the chat.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each event as a line of JSON.")] = False,
    max_new_tokens: opt.MaxNewTokens = None,
    min_new_tokens: opt.MinNewTokens = None,
    temperature: opt.Temperature = None,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    min_p: opt.MinP = None,
    typical_p: opt.TypicalP = None,
    repetition_penalty: opt.RepetitionPenalty = None,
    frequency_penalty: opt.FrequencyPenalty = None,
    presence_penalty: opt.PresencePenalty = None,
    seed: opt.Seed = None,
    stop: opt.Stop = None,
    stop_token_ids: opt.StopTokenIds = None,
    ignore_eos: opt.IgnoreEos = None,
    include_stop: opt.IncludeStop = None,
    logprobs: opt.Logprobs = None,
    top_n_tokens: opt.TopNTokens = None,
    prompt_details: opt.PromptDetails = None,
    skip_special_tokens: opt.SkipSpecialTokens = None,
    max_draft_tokens: opt.MaxDraftTokens = None,
    usd_method: opt.UsdMethod = None,
    truncate: opt.Truncate = None,
) -> None:
    """Stream the answer to a prompt to stdout; how fast it came goes to stderr."""
    with _one_line_errors(), _client(context) as client:
        text = _read_stdin() if prompt in (None, "-") else prompt
        _stream(client, _compose(client, str(text), chat, system), opt.generate_options(context), as_json)


def _read_stdin() -> str:
    if sys.stdin.isatty():
        raise ValueError("no prompt; give it as the argument or pipe it to stdin")
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt on stdin is not UTF-8: {error}") from None


def _compose(client: Client, text: str, chat: bool | None, system: str | None) -> Prompt:
    if chat is None:
        chat = system is not None or client.info().has_chat_template
    if not chat:
        if system is not None:
            raise ValueError("--system needs a chat; leave out --no-chat")
        return text
    messages = [{"role": "user", "content": text}]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def _write(text: str) -> None:
    # Bytes, as the terminal's locale may not have all characters.
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()


def _stream(client: Client, prompt: Prompt, options: GenerateOptions, as_json: bool) -> None:
    started_at = time.perf_counter()
    first_token_s, summary, last_text = None, None, "\n"
    try:
        with client.stream(prompt, **options) as stream:
            for event in stream:
                if first_token_s is None and event.token_ids:
                    first_token_s = time.perf_counter() - started_at
                written = json.dumps(asdict(event), ensure_ascii=False) + "\n" if as_json else event.text
                _write(written)
                last_text = written or last_text
                summary = event.summary
    finally:
        if not last_text.endswith("\n"):  # stdout keeps exactly the text; what follows on stderr has its own line
            typer.echo(err=True)
    if summary is not None:
        typer.echo(summary_line(summary, time.perf_counter() - started_at, first_token_s), err=True)


def info(
    context: typer.Context,
    target: opt.Targets = None,
    port: opt.Port = opt.DEFAULT_PORT,
    tls: opt.Tls = False,
    tls_ca: opt.TlsCa = None,
    timeout: opt.Timeout = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a server's model, limits and load."""
    with _one_line_errors(), _client(context) as client:
        answer = client.info()
    if as_json:
        _write(json.dumps(asdict(answer), indent=2, ensure_ascii=False) + "\n")
    else:
        Console().print(info_table(answer))


def bench(
    context: typer.Context,
    target: opt.Targets = None,
    port: opt.Port = opt.DEFAULT_PORT,
    tls: opt.Tls = False,
    tls_ca: opt.TlsCa = None,
    timeout: opt.Timeout = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests at a time, the next when one ends.", show_default="1")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Instead: requests a second, with Poisson arrivals.")] = None,
    num_requests: Annotated[int, typer.Option(min=1, help="Requests to measure.")] = 16,
    warmup: Annotated[int, typer.Option(min=0, help="Requests sent before, not measured.")] = 1,
    prompt_file: Annotated[
        Path | None, typer.Option(help='.jsonl: "text", "token_ids" or "chat" a line; else a text a line. Repeats.')
    ] = None,
    input_tokens: Annotated[
        int | None, typer.Option(min=1, help="Length of synthetic prompts.", show_default="128")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts and arrivals; request i samples with seed + i.")] = 0,
    json_file: Annotated[
        str | None, typer.Option("--json", help="Write the report as JSON to this file; '-': print it alone.")
    ] = None,
    max_new_tokens: opt.MaxNewTokens = 128,
    min_new_tokens: opt.MinNewTokens = None,
    ignore_eos: opt.IgnoreEos = None,
    temperature: opt.Temperature = None,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    min_p: opt.MinP = None,
    typical_p: opt.TypicalP = None,
    repetition_penalty: opt.RepetitionPenalty = None,
    frequency_penalty: opt.FrequencyPenalty = None,
    presence_penalty: opt.PresencePenalty = None,
    max_draft_tokens: opt.MaxDraftTokens = None,
    usd_method: opt.UsdMethod = None,
) -> None:
    """Put load on a server and report latencies and throughput; exits 1 if all requests fail."""
    with _one_line_errors():
        settings = BenchSettings(concurrency, rate, num_requests, warmup, prompt_file, input_tokens, seed)
        report = _run_bench(context, settings)
        _show_report(report, json_file)
    raise typer.Exit(0 if report["completed"] else 1)


def _run_bench(context: typer.Context, settings: BenchSettings) -> dict[str, Any]:
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("requests", total=settings.num_requests)
        return asyncio.run(
            run_bench(
                settings,
                opt.generate_options(context),
                targets=opt.targets(context),
                credentials=opt.credentials(context),
                timeout_s=context.params["timeout"],
                progress=lambda record: progress.advance(task),
            )
        )


def _show_report(report: dict[str, Any], json_file: str | None) -> None:
    document = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if json_file == "-":
        _write(document)
        return
    for table in report_tables(report):
        Console().print(table)
    if json_file is not None:
        try:
            Path(json_file).write_text(document, encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--json {json_file}: {error.strerror}") from None
