"""The command-line options that the client commands share."""

from pathlib import Path
from typing import Annotated, cast

import grpc
import typer

from specserve.router_client.types import GenerateOptions

DEFAULT_PORT = 3000

Targets = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        "-t",
        envvar="SPECSERVE_TARGET",
        help="host:port, unix:/path or dns:///host:port; repeat it to balance over several.",
        show_default="127.0.0.1:PORT",
    ),
]
Port = Annotated[int, typer.Option(envvar="PORT", min=1, max=65535, help="Port on 127.0.0.1, without --target.")]
Tls = Annotated[bool, typer.Option("--tls", help="Connect with TLS.")]
TlsCa = Annotated[
    Path | None, typer.Option(help="PEM file of the authorities to trust, instead of gRPC's own; implies --tls.")
]
Timeout = Annotated[float | None, typer.Option(help="Deadline of each call in seconds.", show_default="none")]

_SAMPLING, _STOPPING, _ANSWER = "Sampling", "Stopping", "Answer"


def _option(help_text: str, panel: str, *names: str) -> typer.models.OptionInfo:
    # typer.Option is declared to return Any
    option: typer.models.OptionInfo = typer.Option(*names, help=help_text, rich_help_panel=panel, show_default=False)
    return option


Temperature = Annotated[float | None, _option("0: greedy. Default: greedy, or 1 with top-k etc.", _SAMPLING)]
TopK = Annotated[int | None, _option("Sample among the k likeliest tokens.", _SAMPLING)]
TopP = Annotated[float | None, _option("(0, 1]: sample in the smallest set of at least this mass.", _SAMPLING)]
MinP = Annotated[float | None, _option("[0, 1]: drop tokens below this share of the likeliest.", _SAMPLING)]
TypicalP = Annotated[float | None, _option("(0, 1]: locally typical sampling with this mass.", _SAMPLING)]
RepetitionPenalty = Annotated[float | None, _option("> 0; 1: off.", _SAMPLING)]
FrequencyPenalty = Annotated[float | None, _option("[-2, 2]; 0: off.", _SAMPLING)]
PresencePenalty = Annotated[float | None, _option("[-2, 2]; 0: off.", _SAMPLING)]
Seed = Annotated[int | None, _option("Seed of the sampling. Default: drawn by the server.", _SAMPLING)]
MaxNewTokens = Annotated[int | None, _option("Most tokens to generate. Default: the server's.", _STOPPING)]
MinNewTokens = Annotated[int | None, _option("Fewest tokens to generate.", _STOPPING)]
Stop = Annotated[list[str] | None, _option("Stop at this text; may be repeated.", _STOPPING)]
StopTokenIds = Annotated[list[int] | None, _option("Stop at this id; may be repeated.", _STOPPING, "--stop-token-id")]
IgnoreEos = Annotated[bool | None, _option("Don't stop at the model's EOS tokens.", _STOPPING, "--ignore-eos")]
IncludeStop = Annotated[bool | None, _option("Whether the text ends with what stopped it. Default: yes.", _STOPPING)]
Logprobs = Annotated[bool | None, _option("Log-probabilities of the tokens (with --json).", _ANSWER, "--logprobs")]
TopNTokens = Annotated[int | None, _option("As many likeliest tokens beside each (with --json).", _ANSWER)]
PromptDetails = Annotated[bool | None, _option("The prompt's tokens (with --json).", _ANSWER, "--prompt-details")]
SkipSpecialTokens = Annotated[bool | None, _option("Leave special tokens out of the text. Default: yes.", _ANSWER)]
MaxDraftTokens = Annotated[int | None, _option("Most draft tokens a step; 0: no speculation.", _ANSWER)]
UsdMethod = Annotated[str | None, _option("tli or slem, with a usd speculator.", _ANSWER, "--usd-method")]
Truncate = Annotated[int | None, _option("Keep only the last so many prompt tokens.", _ANSWER)]


def generate_options(context: typer.Context) -> GenerateOptions:
    """The options of a generation that were given to this command."""
    given = {
        name: value
        for name, value in context.params.items()
        if name in GenerateOptions.__annotations__ and value is not None
    }
    return cast(GenerateOptions, given)  # the commands declare the types


def targets(context: typer.Context) -> list[str]:
    """The servers that were named, or the one on this machine."""
    return list(context.params["target"] or [f"127.0.0.1:{context.params['port']}"])


def credentials(context: typer.Context) -> grpc.ChannelCredentials | None:
    """Credentials for TLS, if it was asked for; ValueError for an unreadable file of authorities."""
    authorities: Path | None = context.params["tls_ca"]
    if authorities is not None:
        try:
            return grpc.ssl_channel_credentials(Path(authorities).read_bytes())
        except OSError as error:
            raise ValueError(f"--tls-ca {authorities}: {error.strerror}") from None
    return grpc.ssl_channel_credentials() if context.params["tls"] else None
