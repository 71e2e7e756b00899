"""A loaded model, as the gRPC side sees it; made by launch.py."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from specserve.models.tokenizer import Tokenizer
from specserve.server.engine.engine import EngineStats
from specserve.server.engine.sequence import Request, SequenceEvent


class EngineClient(Protocol):
    """What the server needs of AsyncEngine."""

    dead: asyncio.Future[Exception]

    async def start(self) -> None:
        """Start on the running event loop; `dead` exists from then on."""
        ...

    def generate(self, request: Request) -> AsyncGenerator[SequenceEvent, None]:
        """The events of a request; closing the generator aborts it."""
        ...

    def stats(self) -> EngineStats:
        """The load at this moment."""
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, wait for the running ones, end those that are left with DrainingError."""
        ...

    def fail(self, error: Exception) -> None:
        """Set `dead`, and end all streams with the error."""
        ...

    async def stop(self) -> None:
        """End for good."""
        ...


class ChatRenderer(Protocol):
    """What the server needs of ChatTemplate."""

    @property
    def exists(self) -> bool:
        """Whether the model has a template."""
        ...

    def user_header(self) -> str:
        """The text in front of what a user says first."""
        ...

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Text of the prompt; ValueError, in one line that names the field, for messages that don't do."""
        ...


@dataclass(frozen=True, slots=True)
class SpeculatorDescription:
    """The speculator, as Info tells it."""

    type: str = "none"
    id: str = ""
    num_speculative_tokens: int = 0
    num_parameters: int = 0
    usd_method: str = ""


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The model and the limits that hold for it, all resolved: nothing is "auto" any more.

    `eos_token_ids` is the union of what configuration and tokenizer name.
    """

    model_id: str
    revision: str
    model_type: str
    dtype: str
    device: str
    attention_backend: str
    num_shard: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_input_tokens: int
    max_total_tokens: int
    max_batch_tokens: int
    max_batch_size: int
    speculator: SpeculatorDescription = field(default_factory=SpeculatorDescription)


@dataclass(frozen=True, slots=True)
class Serving:
    """Everything a request needs. The engine is warmed up, and not started yet."""

    engine: EngineClient
    tokenizer: Tokenizer
    chat_template: ChatRenderer
    description: ModelDescription
