"""The command `specserve`. Commands import what they need themselves, so that help and client do without torch."""

import dataclasses
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from specserve.router_client import cli as client_cli
from specserve.server import cli_options as opt
from specserve.server import train_cli
from specserve.server.config import (
    AttentionBackendName,
    ConfigError,
    Device,
    DraftLengthRule,
    DType,
    LogLevel,
    ServerConfig,
    SpeculatorDType,
    Verification,
)
from specserve.server.flags import hub_token, resolve
from specserve.server.version import package_version
from specserve.speculators.base import SpeculatorType, UsdMethod

if TYPE_CHECKING:
    from specserve.server.serving import Serving

app = typer.Typer(
    name="specserve",
    help="A gRPC inference server for language models, and its client.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"specserve {package_version()}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def serve(
    context: typer.Context,
    model_id: opt.ModelId = None,
    revision: opt.Revision = None,
    offline: opt.Offline = False,
    dtype: opt.DTypeFlag = DType.AUTO,
    device: opt.DeviceFlag = Device.AUTO,
    attention_backend: opt.AttentionBackend = AttentionBackendName.AUTO,
    num_shard: opt.NumShard = None,
    rank_timeout: opt.RankTimeout = 5.0,
    num_threads: opt.NumThreads = None,
    kv_cache_memory: opt.KvCacheMemory = None,
    block_size: opt.BlockSize = None,
    prefix_caching: opt.PrefixCaching = True,
    max_input_tokens: opt.MaxInputTokens = None,
    max_total_tokens: opt.MaxTotalTokens = None,
    max_batch_tokens: opt.MaxBatchTokens = 512,
    max_batch_size: opt.MaxBatchSize = 32,
    max_concurrent_requests: opt.MaxConcurrentRequests = 128,
    max_stop_sequences: opt.MaxStopSequences = 4,
    max_top_n_tokens: opt.MaxTopNTokens = 5,
    speculator: opt.Speculator = SpeculatorType.NONE,
    speculator_id: opt.SpeculatorId = None,
    num_speculative_tokens: opt.NumSpeculativeTokens = None,
    draft_length: opt.DraftLengthFlag = DraftLengthRule.ADAPTIVE,
    speculator_dtype: opt.SpeculatorDTypeFlag = SpeculatorDType.AUTO,
    speculator_num_shard: opt.SpeculatorNumShard = None,
    usd_method: opt.UsdMethodFlag = UsdMethod.AUTO,
    verification: opt.VerificationFlag = Verification.MATCH,
    hostname: opt.Hostname = None,
    port: opt.Port = None,
    unix_socket: opt.UnixSocket = None,
    max_message_size: opt.MaxMessageSize = "16MiB",
    drain_timeout: opt.DrainTimeout = 30.0,
    log_level: opt.LogLevelFlag = LogLevel.INFO,
    json_logs: opt.JsonLogs = False,
) -> None:
    """Serve a model over gRPC. A token for the Hub is taken from HF_TOKEN."""
    config = resolve(context.params)
    from specserve.server.logs import configure_logging

    configure_logging(config.log)
    if config.parallel.num_shard > 1 and config.parallel.place is None:
        from specserve.server.launcher import run_shards

        raise typer.Exit(run_shards(config.parallel.num_shard, sys.argv[1:]))
    if config.parallel.place is None or config.parallel.place.rank == 0:
        _show_config(config)
    if config.parallel.place is not None:
        from specserve.server.rank import run_rank

        raise typer.Exit(run_rank(config, _announcer(config)))
    from specserve.server.grpc_server import run_server

    raise typer.Exit(run_server(config, _check, _build, _announcer(config)))


def _check(config: ServerConfig) -> None:
    from specserve.server.loading import check

    check(config)


def _build(config: ServerConfig) -> "Serving":
    from specserve.server.launch import build

    return build(config)


@app.command()
def download(
    model_id: Annotated[str, typer.Argument(help="Hub id, or 'demo'.")],
    revision: opt.Revision = None,
) -> None:
    """Fetch a model into the Hub's cache (HF_HOME), and print where it is."""
    from specserve.models.hub import ModelError, resolve_model

    try:
        files = resolve_model(model_id, revision=revision, token=hub_token())
    except ModelError as error:
        _fail(str(error), 1)
    typer.echo(files.path)


def _config_rows(config: ServerConfig) -> dict[str, dict[str, Any]]:
    """Section -> option -> value; without the Hub token."""
    sections: dict[str, dict[str, Any]] = {}
    for section in dataclasses.fields(config):
        part = getattr(config, section.name)
        sections[section.name] = {
            option.name: getattr(part, option.name) for option in dataclasses.fields(part) if option.repr
        }
    return sections


def _show_config(config: ServerConfig) -> None:
    sections = _config_rows(config)
    if config.log.json:
        _print_line(json.dumps({"event": "configuration", **sections}, default=str))
        return
    table = Table(title="specserve", show_header=False, title_justify="left")
    for name, options in sections.items():
        for index, (option, value) in enumerate(options.items()):
            shown = "-" if value is None else str(value)
            table.add_row(name if index == 0 else "", option, shown, end_section=index == len(options) - 1)
    Console().print(table)


def _announcer(config: ServerConfig) -> Callable[[str, "Serving"], None]:
    def announce(address: str, serving: "Serving") -> None:
        stats, model_id = serving.engine.stats(), serving.description.model_id
        num_kv_tokens = stats.num_blocks * stats.block_size
        speculator = serving.description.speculator
        if config.log.json:
            ready = {"event": "ready", "address": address, "model_id": model_id, "kv_tokens": num_kv_tokens}
            _print_line(json.dumps({**ready, "speculator": dataclasses.asdict(speculator)}))
        else:
            line = f"specserve is ready at {address}: model {model_id}, {num_kv_tokens} KV tokens"
            if speculator.num_speculative_tokens:
                size = f"{speculator.num_parameters / 1e6:.1f}M parameters"
                kind = " ".join(filter(None, (speculator.type, speculator.usd_method)))
                line += f", speculator {kind} {speculator.id} ({size})"
                line += f" drafting {speculator.num_speculative_tokens} tokens"
            _print_line(line)

    return announce


def _print_line(line: str) -> None:
    print(line, flush=True)


def _fail(message: str, code: int) -> Any:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(code)


client_cli.register(app)
train_cli.register(app)


def main() -> None:
    """Entry point of the command; every mistake of a user costs one line."""
    try:
        code = app(prog_name="specserve", standalone_mode=False)
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        code = 2
    except typer.Abort:
        typer.echo("error: aborted", err=True)
        code = 1
    except Exception as error:
        # Click's UsageError, which typer keeps in a module of its own or takes from click, by its version.
        if not hasattr(error, "format_message"):
            raise
        typer.echo(f"error: {' '.join(error.format_message().split())}", err=True)
        code = 2
    sys.exit(code or 0)
