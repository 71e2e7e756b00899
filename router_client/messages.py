"""Between the client's types and protobuf; requests are checked here for what the wire can't carry.

Only types and the widths of integers are checked; limits that depend on the model are the server's to name.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from numbers import Real
from typing import Any

from grpc_health.v1 import health_pb2

from specserve.proto import specserve_pb2 as pb
from specserve.router_client.types import (
    FinishReason,
    GenerateOptions,
    Generation,
    HealthStatus,
    Prompt,
    ServerInfo,
    SpeculatorInfo,
    StreamEvent,
    Summary,
    Token,
    Tokenization,
    TopToken,
)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}; it must be a str, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        character = f"U+{ord(value[error.start]):04X}"
        raise ValueError(f"{name} has a lone surrogate ({character}) at index {error.start}; UTF-8 has none") from None
    return value


def _integer(name: str, value: object, bits: int) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]  # a TypeError is the check
    except TypeError:
        raise ValueError(f"{name} is {value!r}; it must be an int, not {type(value).__name__}") from None
    if not 0 <= number < 2**bits:
        raise ValueError(f"{name} is {number}; it must be in 0..2**{bits} - 1")
    return number


def _uint32(name: str, value: object) -> int:
    return _integer(name, value, 32)


def _uint64(name: str, value: object) -> int:
    return _integer(name, value, 64)


def _real(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} is {value!r}; it must be a number, not {type(value).__name__}")
    return float(value)


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be True or False, not {type(value).__name__}")
    return value


def _each(name: str, value: object, check: Callable[[str, object], Any]) -> list[Any]:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes, bytearray, memoryview)):
        raise ValueError(f"{name} is {value!r}; it must be a sequence (list, tuple), not {type(value).__name__}")
    return [check(f"{name}[{index}]", item) for index, item in enumerate(value)]


def _ids(name: str, value: object) -> list[int]:
    return _each(name, value, _uint32)


def _texts(name: str, value: object) -> list[str]:
    return _each(name, [value] if isinstance(value, str) else value, _text)


# For each option: the part of GenerateRequest where the field of this name is ("": itself), and its check.
_OPTIONS: dict[str, tuple[str, Callable[[str, object], Any]]] = {
    "temperature": ("sampling", _real),
    "top_k": ("sampling", _uint32),
    "top_p": ("sampling", _real),
    "min_p": ("sampling", _real),
    "typical_p": ("sampling", _real),
    "repetition_penalty": ("sampling", _real),
    "frequency_penalty": ("sampling", _real),
    "presence_penalty": ("sampling", _real),
    "seed": ("sampling", _uint64),
    "max_new_tokens": ("stopping", _uint32),
    "min_new_tokens": ("stopping", _uint32),
    "stop": ("stopping", _texts),
    "stop_token_ids": ("stopping", _ids),
    "ignore_eos": ("stopping", _flag),
    "include_stop": ("stopping", _flag),
    "logprobs": ("response", _flag),
    "top_n_tokens": ("response", _uint32),
    "prompt_details": ("response", _flag),
    "skip_special_tokens": ("response", _flag),
    "max_draft_tokens": ("speculation", _uint32),
    "usd_method": ("speculation", _text),
    "truncate": ("", _uint32),
}


def generate_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """The request of both Generate and GenerateStream.

    Raises:
        ValueError: an option (or the prompt) of a wrong type, or outside what its field can hold.
        TypeError: an option that doesn't exist.
    """
    request = pb.GenerateRequest()
    _set_input(request, prompt)
    for name, value in options.items():
        if name not in _OPTIONS:
            raise TypeError(f"unknown option {name!r}; the options are {', '.join(_OPTIONS)}")
        if value is None:
            continue
        part, check = _OPTIONS[name]
        message: Any = getattr(request, part) if part else request
        checked = check(name, value)
        if isinstance(checked, list):
            getattr(message, name).extend(checked)
        else:
            setattr(message, name, checked)
    return request


def tokenize_request(prompt: Prompt, truncate: int | None) -> pb.TokenizeRequest:
    """The request of Tokenize; raises ValueError like `generate_request`, and for token ids as the prompt."""
    request = pb.TokenizeRequest()
    _set_input(request, prompt)
    if truncate is not None:
        request.truncate = _uint32("truncate", truncate)
    return request


def _set_input(request: pb.GenerateRequest | pb.TokenizeRequest, prompt: object) -> None:
    if isinstance(prompt, str):
        request.text = _text("prompt", prompt)
        return
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray, memoryview)):
        raise ValueError(f"prompt is of type {type(prompt).__name__}; it must be a str, token ids or chat messages")
    if not prompt:
        raise ValueError("prompt is an empty sequence; it must have at least one token id or chat message")
    if isinstance(prompt[0], Mapping):
        request.chat.messages.extend(_each("prompt", prompt, _message))
    elif isinstance(request, pb.TokenizeRequest):
        raise ValueError("prompt is a sequence of token ids; only a str or chat messages can be tokenized")
    else:
        request.token_ids.ids.extend(_ids("prompt", prompt))


def _message(name: str, value: object) -> pb.ChatMessage:
    if not isinstance(value, Mapping) or set(value) != {"role", "content"}:
        raise ValueError(f'{name} is {value!r}; a chat message is a mapping with the keys "role" and "content" alone')
    return pb.ChatMessage(
        role=_text(f"{name}['role']", value["role"]), content=_text(f"{name}['content']", value["content"])
    )


_FINISH_REASONS: dict[int, FinishReason] = {
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_EOS_TOKEN: FinishReason.EOS_TOKEN,
    pb.FINISH_REASON_STOP_STRING: FinishReason.STOP_STRING,
    pb.FINISH_REASON_STOP_TOKEN: FinishReason.STOP_TOKEN,
}


def _optional(message: Any, name: str) -> Any:
    return getattr(message, name) if message.HasField(name) else None


def _tokens(details: Iterable[pb.TokenDetails]) -> tuple[Token, ...]:
    return tuple(
        Token(
            id=detail.id,
            text=detail.text,
            logprob=_optional(detail, "logprob"),
            rank=_optional(detail, "rank"),
            special=detail.special,
            top=tuple(TopToken(top.id, top.text, top.logprob) for top in detail.top),
        )
        for detail in details
    )


def summary_from(message: pb.GenerationSummary) -> Summary:
    """The summary in a response."""
    return Summary(
        finish_reason=_FINISH_REASONS.get(message.finish_reason, FinishReason.UNSPECIFIED),
        prompt_tokens=message.prompt_tokens,
        generated_tokens=message.generated_tokens,
        seed=message.seed,
        queue_seconds=message.queue_seconds,
        prefill_seconds=message.prefill_seconds,
        decode_seconds=message.decode_seconds,
        drafted_tokens=message.drafted_tokens,
        accepted_tokens=message.accepted_tokens,
        num_drafts=message.num_drafts,
        accepted_per_position=tuple(message.accepted_per_position),
        mean_acceptance_length=_optional(message, "mean_acceptance_length"),
        cached_prompt_tokens=message.cached_prompt_tokens,
        stop_string=_optional(message, "stop_string"),
        stop_token_id=_optional(message, "stop_token_id"),
    )


def event_from(message: pb.GenerateStreamResponse) -> StreamEvent:
    """One event of GenerateStream."""
    return StreamEvent(
        token_ids=tuple(message.token_ids),
        text=message.text,
        details=_tokens(message.details),
        prompt=_tokens(message.prompt),
        summary=summary_from(message.summary) if message.HasField("summary") else None,
        generated_tokens=message.generated_tokens,
    )


def generation_from(message: pb.GenerateResponse) -> Generation:
    """The answer of Generate."""
    return Generation(
        token_ids=tuple(message.token_ids),
        text=message.text,
        summary=summary_from(message.summary),
        details=_tokens(message.details),
        prompt=_tokens(message.prompt),
    )


def tokenization_from(message: pb.TokenizeResponse) -> Tokenization:
    """The answer of Tokenize."""
    return Tokenization(tuple(message.token_ids), tuple(message.tokens))


def info_from(message: pb.InfoResponse) -> ServerInfo:
    """The answer of Info; the fields of both carry the same names."""
    speculator = {item.name: getattr(message.speculator, item.name) for item in fields(SpeculatorInfo)}
    speculator["accepted_per_position"] = tuple(message.speculator.accepted_per_position)
    speculator["mean_acceptance_length"] = _optional(message.speculator, "mean_acceptance_length")
    values = {item.name: getattr(message, item.name) for item in fields(ServerInfo)}
    values |= {"speculator": SpeculatorInfo(**speculator), "eos_token_ids": tuple(message.eos_token_ids)}
    return ServerInfo(**values)


_HEALTH = {
    health_pb2.HealthCheckResponse.SERVING: HealthStatus.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING: HealthStatus.NOT_SERVING,
}


def health_from(message: health_pb2.HealthCheckResponse) -> HealthStatus:
    """The answer of a health check."""
    return _HEALTH.get(message.status, HealthStatus.UNKNOWN)
