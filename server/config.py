"""The configuration of a server: frozen dataclasses."""

import enum
from dataclasses import dataclass, field
from pathlib import Path

from specserve.server.place import RankPlace
from specserve.speculators.base import SpeculatorType, UsdMethod

DEFAULT_HOSTNAME = "0.0.0.0"
DEFAULT_PORT = 3000


class ConfigError(Exception):
    """A flag that can't be used; the message names the flag, its value and what to do."""


class DType(enum.StrEnum):
    """Number format of weights and KV cache."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class Device(enum.StrEnum):
    """Where the model runs."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class AttentionBackendName(enum.StrEnum):
    """The backends of models/attention."""

    AUTO = "auto"
    TORCH = "torch"
    CPU = "cpu"
    FLASH = "flash"


class DraftLengthRule(enum.StrEnum):
    """How much is drafted in a step."""

    ADAPTIVE = "adaptive"
    FIXED = "fixed"


class SpeculatorDType(enum.StrEnum):
    """Number format of a draft model's weights; int8 computes in the format of the target."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"


class Verification(enum.StrEnum):
    """The rule for drafts of requests that sample and name no seed; others are always matched."""

    MATCH = "match"
    REJECTION = "rejection"


class LogLevel(enum.StrEnum):
    """Least severe level that is logged."""

    TRACE = "trace"
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model to serve, and how. AUTO stands for what suits the machine and the model."""

    model_id: str
    revision: str | None = None
    dtype: DType = DType.AUTO
    device: Device = Device.AUTO
    attention_backend: AttentionBackendName = AttentionBackendName.AUTO
    offline: bool = False
    hub_token: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The KV cache. `kv_cache_memory` is in bytes. None: what suits the device and the attention backend."""

    kv_cache_memory: int | None = None
    block_size: int | None = None
    prefix_caching: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """Limits of requests and steps. None: what model and KV cache allow."""

    max_input_tokens: int | None = None
    max_total_tokens: int | None = None
    max_batch_tokens: int = 512
    max_batch_size: int = 32
    max_concurrent_requests: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculatorOptions:
    """What drafts tokens."""

    type: SpeculatorType = SpeculatorType.NONE
    id: str | None = None
    num_speculative_tokens: int | None = None  # at most; None: as many as it can draft
    draft_length: DraftLengthRule = DraftLengthRule.ADAPTIVE
    dtype: SpeculatorDType = SpeculatorDType.AUTO  # of usd, as what follows
    usd_method: UsdMethod = UsdMethod.AUTO
    num_shard: int | None = None  # 1, or as many as the model's; None: as suits the device
    verification: Verification = Verification.MATCH


@dataclass(frozen=True, slots=True)
class ParallelOptions:
    """Processes and threads. `num_threads` None: as torch thinks fit."""

    num_shard: int = 1
    num_threads: int | None = None
    rank_timeout_s: float = 5.0
    place: RankPlace | None = field(default=None, repr=False)  # of this process, if a launcher started it


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """The gRPC side. `port` None: no TCP; 0: any free port."""

    hostname: str = DEFAULT_HOSTNAME
    port: int | None = DEFAULT_PORT
    unix_socket: Path | None = None
    max_message_bytes: int = 16 * 2**20
    drain_timeout_s: float = 30.0
    max_stop_sequences: int = 4
    max_top_n_tokens: int = 5


@dataclass(frozen=True, slots=True)
class LogOptions:
    """The log on stderr."""

    level: LogLevel = LogLevel.INFO
    json: bool = False


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Everything that `specserve serve` can be told."""

    model: ModelOptions
    cache: CacheOptions = field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    speculator: SpeculatorOptions = field(default_factory=SpeculatorOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    server: ListenOptions = field(default_factory=ListenOptions)
    log: LogOptions = field(default_factory=LogOptions)
