"""Request messages to what the engine takes; every limit in proto/specserve.proto is checked here."""

import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from specserve.models.sampling.params import SamplingParams
from specserve.models.tokenizer import Tokenizer
from specserve.proto import specserve_pb2 as pb
from specserve.server.engine.sequence import Request
from specserve.server.errors import InvalidRequestError, UnsupportedError
from specserve.server.serving import ChatRenderer, ModelDescription
from specserve.server.stopping import StoppingParams, StopTextStream
from specserve.speculators.base import SpeculatorType, UsdMethod

DEFAULT_MAX_NEW_TOKENS = 1024
MAX_STOP_BYTES = 16384
MAX_STOP_TOKEN_IDS = 1024


@dataclass(frozen=True, slots=True)
class _Range:
    """Allowed values of a float field."""

    low: float
    high: float
    excludes_low: bool = False

    def check(self, name: str, value: float) -> float:
        """The value, or InvalidRequestError."""
        low, high = _as_float32(self.low), _as_float32(self.high)
        if low <= value <= high and not (self.excludes_low and value == low):
            return value
        opening = "(" if self.excludes_low else "["
        raise InvalidRequestError(f"{name} is {value:.7g}; it must be in {opening}{self.low:g}, {self.high:g}]")


def _as_float32(value: float) -> float:
    """The value as a float field of protobuf brings it."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


_SAMPLING_RANGES = {
    "temperature": _Range(0, 100),
    "top_p": _Range(0, 1, excludes_low=True),
    "min_p": _Range(0, 1),
    "typical_p": _Range(0, 1, excludes_low=True),
    "repetition_penalty": _Range(1e-6, 1e6),
    "frequency_penalty": _Range(-2, 2),
    "presence_penalty": _Range(-2, 2),
}


def _set_fields(message: Any, names: Sequence[str]) -> dict[str, Any]:
    """Values of those optional fields that are set."""
    return {name: getattr(message, name) for name in names if message.HasField(name)}


def _check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    if ids and max(ids) >= vocab_size:
        index = next(i for i, token_id in enumerate(ids) if token_id >= vocab_size)
        raise InvalidRequestError(f"{name}[{index}] is {ids[index]}; it must be below the vocabulary size {vocab_size}")


@dataclass(frozen=True)
class RequestConverter:
    """Validates requests for one model; no method changes anything, so that threads may share it."""

    tokenizer: Tokenizer
    chat_template: ChatRenderer
    description: ModelDescription
    max_stop_sequences: int
    max_top_n_tokens: int

    @cached_property
    def _eos_token_ids(self) -> frozenset[int]:
        return frozenset(i for i in self.description.eos_token_ids if i < self.description.vocab_size)

    @cached_property
    def max_input_bytes(self) -> int:
        """A text of more bytes is longer than max_input_tokens, whatever it says."""
        sizes = (len(self.tokenizer.token_bytes(i)) for i in range(self.description.vocab_size))
        return max(sizes, default=1) * self.description.max_input_tokens

    def request(self, message: pb.GenerateRequest) -> Request:
        """What the engine takes; slow for a long text, so not for the event loop.

        Raises InvalidRequestError and UnsupportedError.
        """
        self._refuse_unsupported(message)
        options = message.response
        if options.top_n_tokens > self.max_top_n_tokens:
            raise InvalidRequestError(
                f"response.top_n_tokens is {options.top_n_tokens}; it must be at most {self.max_top_n_tokens} "
                "(--max-top-n-tokens)"
            )
        sampling = self._sampling(message.sampling)
        stop_strings = self._stop_strings(message.stopping.stop)
        stop_token_ids = self._stop_token_ids(message.stopping.stop_token_ids)
        prompt_token_ids = self.prompt(message, enforce_limit=True)
        max_new_tokens, min_new_tokens = self._num_new_tokens(message.stopping, len(prompt_token_ids))
        eos_token_ids = frozenset() if message.stopping.ignore_eos else self._eos_token_ids
        stopping = StoppingParams(
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            stop_strings=stop_strings,
            stop_token_ids=stop_token_ids,
            eos_token_ids=eos_token_ids,
            include_stop=message.stopping.include_stop if message.stopping.HasField("include_stop") else True,
            skip_special_tokens=options.skip_special_tokens if options.HasField("skip_special_tokens") else True,
        )
        wants_details = options.logprobs or options.top_n_tokens > 0
        return Request(
            prompt_token_ids=prompt_token_ids,
            sampling=SamplingParams(
                **sampling,
                min_new_tokens=min_new_tokens,
                suppressed_ids=self._suppressed_ids(min_new_tokens, eos_token_ids | stop_token_ids),
                logprobs=options.logprobs,
                top_n_tokens=options.top_n_tokens,
                prompt_logprobs=options.prompt_details and wants_details,
            ),
            text_stream=StopTextStream(self.tokenizer, stopping),
            max_new_tokens=max_new_tokens,
            prompt_details=options.prompt_details,
            max_draft_tokens=_set_fields(message.speculation, ["max_draft_tokens"]).get("max_draft_tokens"),
            usd_method=self._usd_method(message.speculation),
        )

    def prompt(self, message: pb.GenerateRequest | pb.TokenizeRequest, *, enforce_limit: bool) -> list[int]:
        """The prompt's token ids, truncated as asked; `enforce_limit`: neither empty nor over max_input_tokens."""
        kind = message.WhichOneof("input")
        if kind is None:
            choices = ", ".join(oneof.name for oneof in message.DESCRIPTOR.oneofs_by_name["input"].fields)
            raise InvalidRequestError(f"input is not set; give one of {choices}")
        if message.HasField("truncate") and message.truncate == 0:
            raise InvalidRequestError("truncate is 0; it must be at least 1 (leave it unset not to truncate)")
        if kind == "token_ids":
            assert isinstance(message, pb.GenerateRequest)
            ids = list(message.token_ids.ids)
            _check_ids("token_ids.ids", ids, self.description.vocab_size)
        else:
            ids = self._encode(message, kind, check_bytes=enforce_limit and not message.truncate)
        if message.truncate:
            ids = ids[-message.truncate :]
        if enforce_limit:
            self._check_length(kind, len(ids))
        return ids

    def _encode(self, message: pb.GenerateRequest | pb.TokenizeRequest, kind: str, *, check_bytes: bool) -> list[int]:
        try:
            if kind == "text":
                text = message.text
            else:
                messages = [{"role": part.role, "content": part.content} for part in message.chat.messages]
                text = self.chat_template.render(messages)
            if check_bytes:
                self._check_num_bytes(kind, text)
            return self.tokenizer.encode(text, add_special_tokens=kind == "text")
        except InvalidRequestError:
            raise
        except ValueError as error:  # of template and tokenizer; they name the field
            raise InvalidRequestError(str(error)) from error

    def _check_num_bytes(self, kind: str, text: str) -> None:
        num_bytes = len(text.encode())
        if num_bytes > self.max_input_bytes:
            raise InvalidRequestError(
                f"{kind} has {num_bytes} bytes, too many for {self.description.max_input_tokens} tokens "
                "(--max-input-tokens); send less, or set truncate"
            )

    def _check_length(self, kind: str, num_tokens: int) -> None:
        limit = self.description.max_input_tokens
        if num_tokens == 0:
            raise InvalidRequestError(f"{kind} is empty; it must give at least 1 token")
        if num_tokens > limit:
            raise InvalidRequestError(
                f"{kind} has {num_tokens} tokens; at most {limit} (--max-input-tokens) are allowed; send less, or set "
                "truncate"
            )

    def _refuse_unsupported(self, message: pb.GenerateRequest) -> None:
        if message.HasField("grammar"):
            raise UnsupportedError("grammar is set; this server can't constrain its answers yet; leave it unset")
        if message.adapter_id:
            raise UnsupportedError(f"adapter_id is {message.adapter_id!r}; this server has no adapters; leave it empty")

    def _usd_method(self, message: pb.SpeculationParameters) -> UsdMethod | None:
        if not message.HasField("usd_method"):
            return None
        kind, value = self.description.speculator.type, message.usd_method
        if kind != SpeculatorType.USD:
            raise InvalidRequestError(
                f"speculation.usd_method is {value!r}, but the speculator of this server is {kind}; leave it unset"
            )
        if value not in (UsdMethod.TLI, UsdMethod.SLEM):
            raise InvalidRequestError(f"speculation.usd_method is {value!r}; it must be tli or slem")
        return UsdMethod(value)

    def _sampling(self, message: pb.SamplingParameters) -> dict[str, Any]:
        """The fields of SamplingParams that come from SamplingParameters alone."""
        values = _set_fields(message, list(_SAMPLING_RANGES))
        for name, value in values.items():
            _SAMPLING_RANGES[name].check(f"sampling.{name}", value)
        if message.HasField("top_k"):
            if message.top_k == 0:
                raise InvalidRequestError(
                    "sampling.top_k is 0; it must be at least 1 (leave it unset to switch it off)"
                )
            is_cutting = message.top_k < self.description.vocab_size
            values["top_k"] = message.top_k if is_cutting else 0
        if "temperature" not in values:
            is_sampling = (
                message.HasField("top_k")
                or values.get("top_p", 1.0) < 1
                or values.get("min_p", 0.0) > 0
                or values.get("typical_p", 1.0) < 1
            )
            values["temperature"] = 1.0 if is_sampling else 0.0
        values["is_seeded"] = message.HasField("seed")
        values["seed"] = message.seed if message.HasField("seed") else secrets.randbits(64)
        return values

    def _stop_strings(self, stop: Sequence[str]) -> tuple[str, ...]:
        if len(stop) > self.max_stop_sequences:
            raise InvalidRequestError(
                f"stopping.stop has {len(stop)} strings; at most {self.max_stop_sequences} (--max-stop-sequences) are "
                "allowed"
            )
        for index, text in enumerate(stop):
            if not text:
                raise InvalidRequestError(f"stopping.stop[{index}] is empty; it must have at least 1 character")
        num_bytes = sum(len(text.encode()) for text in stop)
        if num_bytes > MAX_STOP_BYTES:
            raise InvalidRequestError(
                f"stopping.stop has {num_bytes} bytes in all; at most {MAX_STOP_BYTES} are allowed"
            )
        return tuple(stop)

    def _stop_token_ids(self, ids: Sequence[int]) -> frozenset[int]:
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"stopping.stop_token_ids has {len(ids)} ids; at most {MAX_STOP_TOKEN_IDS} are allowed"
            )
        _check_ids("stopping.stop_token_ids", ids, self.description.vocab_size)
        return frozenset(ids)

    def _num_new_tokens(self, message: pb.StoppingParameters, num_prompt_tokens: int) -> tuple[int, int]:
        """max_new_tokens and min_new_tokens."""
        limit = self.description.max_total_tokens
        room = limit - num_prompt_tokens
        if room < 1:
            raise InvalidRequestError(
                f"the prompt has {num_prompt_tokens} tokens, which leaves no room for an answer within {limit} "
                "(--max-total-tokens); send less, or set truncate"
            )
        is_set = message.HasField("max_new_tokens")
        max_new_tokens = message.max_new_tokens if is_set else min(room, DEFAULT_MAX_NEW_TOKENS)
        if max_new_tokens < 1:
            raise InvalidRequestError("stopping.max_new_tokens is 0; it must be at least 1")
        if max_new_tokens > room:
            raise InvalidRequestError(
                f"stopping.max_new_tokens is {max_new_tokens}; with a prompt of {num_prompt_tokens} tokens at most "
                f"{room} fit in {limit} (--max-total-tokens)"
            )
        if message.min_new_tokens > max_new_tokens:
            what = f"stopping.max_new_tokens, which is {'' if is_set else 'unset and so '}{max_new_tokens}"
            raise InvalidRequestError(f"stopping.min_new_tokens is {message.min_new_tokens}; it must be at most {what}")
        return max_new_tokens, message.min_new_tokens

    def _suppressed_ids(self, min_new_tokens: int, ids: frozenset[int]) -> tuple[int, ...]:
        if min_new_tokens == 0:
            return ()
        if len(ids) >= self.description.vocab_size:
            raise InvalidRequestError(
                f"stopping.min_new_tokens is {min_new_tokens}, but stop_token_ids and EOS are the whole vocabulary of "
                f"{len(ids)} tokens; leave some token to choose"
            )
        return tuple(sorted(ids))
