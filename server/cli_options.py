"""The flags of `specserve serve`, each with its environment variable: TGI's name where TGI has one."""

from pathlib import Path
from typing import Annotated, Any

import typer

from specserve.server.config import (
    AttentionBackendName,
    Device,
    DraftLengthRule,
    DType,
    LogLevel,
    SpeculatorDType,
    Verification,
)
from specserve.speculators.base import SpeculatorType, UsdMethod

_MODEL, _CACHE, _LIMITS, _SPECULATOR, _SERVER, _LOG = "Model", "KV cache", "Limits", "Speculator", "Server", "Log"
_HOSTNAME_HELP = (
    "Address to listen on. The variable HOSTNAME sets it too, except where it is just this machine's own name, as "
    "Docker, Kubernetes and shells set it."
)


def _option(
    panel: str, envvar: str | list[str] | None, help_text: str, *names: str, **settings: Any
) -> typer.models.OptionInfo:
    # typer.Option is declared to return Any
    option: typer.models.OptionInfo = typer.Option(
        *names, envvar=envvar, help=help_text, rich_help_panel=panel, **settings
    )
    return option


def _auto(
    panel: str, envvar: str | list[str] | None, help_text: str, default: str, **settings: Any
) -> typer.models.OptionInfo:
    """An option that is None unless given; `default` says what this comes to."""
    return _option(panel, envvar, help_text, show_default=default, **settings)


ModelId = Annotated[
    str | None,
    _option(_MODEL, "MODEL_ID", "Hub id, directory in Hub format, .gguf file, or 'demo'.", show_default=False),
]
Revision = Annotated[str | None, _option(_MODEL, "REVISION", "Branch, tag or commit on the Hub.", show_default=False)]
Offline = Annotated[
    bool,
    _option(_MODEL, "HF_HUB_OFFLINE", "Take Hub models from the local cache, without network.", "--offline"),
]
DTypeFlag = Annotated[
    DType,
    _option(_MODEL, "DTYPE", "Of weights and KV cache. auto: float32 on CPUs, bfloat16 on GPUs.", "--dtype"),
]
DeviceFlag = Annotated[Device, _option(_MODEL, "SPECSERVE_DEVICE", "auto: a GPU if torch finds one.", "--device")]
AttentionBackend = Annotated[
    AttentionBackendName,
    _option(_MODEL, "SPECSERVE_ATTENTION_BACKEND", "auto: flash on GPUs, cpu where its kernels are built, else torch."),
]
NumShard = Annotated[
    int | None,
    _auto(
        _MODEL,
        "NUM_SHARD",
        "Processes over which the model is split, each with a GPU (or a share of the cores).",
        "1, or as many as torchrun started",
        min=1,
    ),
]
RankTimeout = Annotated[
    float,
    _option(
        _MODEL, "SPECSERVE_RANK_TIMEOUT", "Seconds without a sign of life or progress of a shard that end the server."
    ),
]
NumThreads = Annotated[
    int | None, _auto(_MODEL, "SPECSERVE_NUM_THREADS", "Threads that compute on CPUs.", "torch's choice", min=1)
]

KvCacheMemory = Annotated[
    str | None,
    _auto(_CACHE, "SPECSERVE_KV_CACHE_MEMORY", "Like 2GiB, 512MB; bounds the tokens of all requests.", "by the device"),
]
BlockSize = Annotated[
    int | None,
    _auto(_CACHE, "SPECSERVE_BLOCK_SIZE", "Tokens in a KV block.", "16; 256 for flash", min=1, max=4096),
]
PrefixCaching = Annotated[
    bool,
    _option(
        _CACHE,
        ["SPECSERVE_PREFIX_CACHING", "USE_PREFIX_CACHING"],
        "Whether requests reuse the KV of equal prompt beginnings.",
        "--prefix-caching/--no-prefix-caching",
    ),
]

MaxInputTokens = Annotated[
    int | None,
    _auto(_LIMITS, "MAX_INPUT_TOKENS", "Longest prompt, after truncation.", "max-total-tokens - 1", min=1),
]
MaxTotalTokens = Annotated[
    int | None,
    _auto(_LIMITS, "MAX_TOTAL_TOKENS", "Longest prompt and answer together.", "what model and KV cache allow", min=2),
]
MaxBatchTokens = Annotated[
    int,
    _option(
        _LIMITS,
        ["MAX_BATCH_TOKENS", "MAX_BATCH_PREFILL_TOKENS"],
        "Most tokens computed in a step; long prompts are computed in chunks of what running answers leave of it.",
        min=1,
    ),
]
MaxBatchSize = Annotated[int, _option(_LIMITS, "MAX_BATCH_SIZE", "Most requests that generate at once.", min=1)]
MaxConcurrentRequests = Annotated[
    int,
    _option(
        _LIMITS, "MAX_CONCURRENT_REQUESTS", "Most requests in the server, waiting ones too; more are refused.", min=1
    ),
]
MaxStopSequences = Annotated[int, _option(_LIMITS, "MAX_STOP_SEQUENCES", "Most stop strings of a request.", min=0)]
MaxTopNTokens = Annotated[int, _option(_LIMITS, "MAX_TOP_N_TOKENS", "Largest top_n_tokens of a request.", min=0)]

Speculator = Annotated[SpeculatorType, _option(_SPECULATOR, "SPECULATOR", "What drafts tokens.")]
SpeculatorId = Annotated[
    str | None,
    _option(
        _SPECULATOR,
        "SPECULATOR_ID",
        "Hub id or directory of the speculator, or 'demo'; for usd any model that --model-id would take.",
        show_default=False,
    ),
]

NumSpeculativeTokens = Annotated[
    int | None,
    _auto(
        _SPECULATOR,
        ["SPECULATE", "SPECSERVE_NUM_SPECULATIVE_TOKENS"],
        "Most tokens to draft a step.",
        "all that the speculator can",
        min=1,
    ),
]

DraftLengthFlag = Annotated[
    DraftLengthRule,
    _option(
        _SPECULATOR,
        "SPECSERVE_DRAFT_LENGTH",
        "adaptive: as many tokens a step as pay, perhaps none, by measured times and acceptance; fixed: always all.",
    ),
]

SpeculatorDTypeFlag = Annotated[
    SpeculatorDType,
    _option(
        _SPECULATOR,
        "SPECSERVE_SPECULATOR_DTYPE",
        "Weights of the draft model of usd; auto is int8 on CPUs and --dtype on GPUs.",
        "--speculator-dtype",
    ),
]
SpeculatorNumShard = Annotated[
    int | None,
    _auto(
        _SPECULATOR,
        "SPECSERVE_SPECULATOR_NUM_SHARD",
        "Shards of the draft model of usd: 1, or as many as --num-shard.",
        "1 on GPUs, --num-shard on CPUs",
        min=1,
    ),
]
UsdMethodFlag = Annotated[
    UsdMethod,
    _option(
        _SPECULATOR,
        "SPECSERVE_USD_METHOD",
        "tli: usd drafts tokens that both vocabularies have; slem: text, matched as a string; auto: tli if enough "
        "tokens are shared. A request can choose for itself.",
        "--usd-method",
    ),
]

VerificationFlag = Annotated[
    Verification,
    _option(
        _SPECULATOR,
        "SPECSERVE_VERIFICATION",
        "For requests that sample without a seed. match: the tokens of the seed that the server takes, as without "
        "drafts; rejection: the same distribution, and more drafts accepted.",
        "--verification",
    ),
]

Hostname = Annotated[str | None, _auto(_SERVER, None, _HOSTNAME_HELP, "0.0.0.0")]
Port = Annotated[
    int | None,
    _auto(_SERVER, "PORT", "TCP port; 0: any free one.", "3000; none with --unix-socket", min=0, max=65535),
]
UnixSocket = Annotated[
    Path | None,
    _option(_SERVER, "SPECSERVE_UNIX_SOCKET", "Listen on this path (too, if --port is given).", show_default=False),
]
MaxMessageSize = Annotated[str, _option(_SERVER, "SPECSERVE_MAX_MESSAGE_SIZE", "Largest request.")]
DrainTimeout = Annotated[
    float,
    _option(_SERVER, "SPECSERVE_DRAIN_TIMEOUT", "Seconds that running requests have to finish after SIGTERM."),
]

LogLevelFlag = Annotated[
    LogLevel, _option(_LOG, "LOG_LEVEL", "Least level to log.", "--log-level", case_sensitive=False)
]
JsonLogs = Annotated[bool, _option(_LOG, ["SPECSERVE_JSON_LOGS", "JSON_OUTPUT"], "Lines of JSON.", "--json-logs")]
