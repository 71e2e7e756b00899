"""What the client takes and gives back: plain data, without grpc and protobuf."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""A text, token ids, or chat messages: mappings with the keys "role" and "content"."""


class GenerateOptions(TypedDict, total=False):
    """Options of a generation; names, units and ranges are those of GenerateRequest in proto/specserve.proto.

    An option that is left out, or None, has the server's default.
    """

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    seed: int | None
    max_new_tokens: int | None
    min_new_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    include_stop: bool | None
    logprobs: bool | None
    top_n_tokens: int | None
    prompt_details: bool | None
    skip_special_tokens: bool | None
    max_draft_tokens: int | None
    usd_method: str | None
    truncate: int | None


class FinishReason(enum.StrEnum):
    """Why a generation ended. UNSPECIFIED: for a reason that this client doesn't know."""

    UNSPECIFIED = "unspecified"
    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_STRING = "stop_string"
    STOP_TOKEN = "stop_token"


class HealthStatus(enum.StrEnum):
    """What a server says of itself; NOT_SERVING while it loads and once it drains."""

    UNKNOWN = "unknown"
    SERVING = "serving"
    NOT_SERVING = "not_serving"


@dataclass(frozen=True, slots=True)
class TopToken:
    """One of the likeliest tokens at a position; `logprob` is a natural logarithm."""

    id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Token:
    """One token with its log-probability (natural, before any processing) and its rank (1: the likeliest).

    Both are None where there is none (first prompt token, or not asked for). `text` is empty while a character
    is incomplete. `top` lists the likeliest tokens of the position, likeliest first.
    """

    id: int
    text: str
    logprob: float | None = None
    rank: int | None = None
    special: bool = False
    top: tuple[TopToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Summary:
    """The end of a generation; times in seconds, see GenerationSummary in proto/specserve.proto."""

    finish_reason: FinishReason
    prompt_tokens: int
    generated_tokens: int
    seed: int
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    num_drafts: int = 0
    accepted_per_position: tuple[int, ...] = ()
    mean_acceptance_length: float | None = None
    cached_prompt_tokens: int = 0
    stop_string: str | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One message of a stream: any number of tokens, also none (events are not tokens).

    `text` is what can be shown now; all texts joined are the text of `Client.generate`. `generated_tokens`
    counts from the start. `prompt` is in the first event only, `summary` in the last one only.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    details: tuple[Token, ...] = ()
    prompt: tuple[Token, ...] = ()
    summary: Summary | None = None
    generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole generation. `details` is filled with logprobs or top_n_tokens, `prompt` with prompt_details."""

    token_ids: tuple[int, ...]
    text: str
    summary: Summary
    details: tuple[Token, ...] = ()
    prompt: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class Tokenization:
    """The ids that a prompt becomes, and the text of each (U+FFFD for bytes that are no whole character)."""

    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SpeculatorInfo:
    """The speculator of a server; see SpeculatorInfo in proto/specserve.proto."""

    type: str
    id: str
    num_speculative_tokens: int
    num_parameters: int
    drafted_tokens: int
    accepted_tokens: int
    num_drafts: int
    accepted_per_position: tuple[int, ...]
    mean_acceptance_length: float | None
    usd_method: str


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The model, the limits and the load of a server; see InfoResponse in proto/specserve.proto."""

    version: str
    model_id: str
    revision: str
    model_type: str
    dtype: str
    device: str
    attention_backend: str
    num_shard: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    max_input_tokens: int
    max_total_tokens: int
    max_batch_tokens: int
    max_batch_size: int
    max_concurrent_requests: int
    max_stop_sequences: int
    max_top_n_tokens: int
    block_size: int
    num_blocks: int
    free_blocks: int
    running_requests: int
    waiting_requests: int
    speculator: SpeculatorInfo
    finished_requests: int
    generated_tokens: int
    preemptions: int
    uptime_seconds: float
