"""A request on its way through the engine, and what the engine says of it; plain data, no torch."""

import enum
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from specserve.models.sampling.params import SamplingParams
from specserve.speculators.base import UsdMethod
from specserve.speculators.draft_length import AcceptanceRate


class FinishReason(enum.Enum):
    """Why a generation ended."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_STRING = "stop_string"
    STOP_TOKEN = "stop_token"


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One token with the log-probabilities that were asked for.

    Log-probabilities are those of the model's own distribution, before any processing. `rank` is 1 for the
    likeliest token. `top` lists (id, logprob), likeliest first.
    """

    token_id: int
    logprob: float | None = None
    rank: int | None = None
    top: tuple[tuple[int, float], ...] = ()
    text: str = ""


@dataclass(frozen=True, slots=True)
class GenerationSummary:
    """The end of a generation; times in seconds."""

    finish_reason: FinishReason
    prompt_tokens: int
    generated_tokens: int
    seed: int
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    num_drafts: int = 0
    accepted_per_position: tuple[int, ...] = ()
    cached_prompt_tokens: int = 0
    stop_string: str | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class SequenceEvent:
    """What one step brought for one request.

    Exactly one event of a request is terminal: it has either a summary or an error.
    """

    request_id: int
    tokens: tuple[TokenOutput, ...] = ()
    text: str = ""
    generated_tokens: int = 0
    prompt: tuple[TokenOutput, ...] | None = None  # in the first event, if prompt details were asked for
    summary: GenerationSummary | None = None
    error: Exception | None = None

    @property
    def is_terminal(self) -> bool:
        """Whether no event of this request follows."""
        return self.summary is not None or self.error is not None


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What one generated token brought: its own text, the text that can be shown now, and perhaps the end."""

    token_text: str
    delta: str
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    stop_token_id: int | None = None


class TextStream(Protocol):
    """Turns the generated tokens of one request into text and says where it ends (server/stopping.py)."""

    def push(self, token_id: int) -> TextPiece:
        """Take the next generated token; with a finish reason the text is complete (held text included)."""
        ...


@dataclass(slots=True)
class Request:
    """A validated request as the engine takes it. `prompt_token_ids` is not empty."""

    prompt_token_ids: Seq[int]
    sampling: SamplingParams
    text_stream: TextStream
    max_new_tokens: int
    prompt_details: bool = False
    max_draft_tokens: int | None = None
    usd_method: UsdMethod | None = None


@dataclass(slots=True)
class Acceptance:
    """What became of drafts; kept for each sequence and for all of them."""

    num_drafts: int = 0  # verifications of at least one drafted token
    num_drafted_tokens: int = 0
    per_position: list[int] = field(default_factory=list)  # accepted tokens that were first, second, … of a draft

    @property
    def num_accepted_tokens(self) -> int:
        """Drafted tokens that became part of an answer."""
        return sum(self.per_position)

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """Take note of one verified draft, of which the first num_accepted tokens were kept."""
        self.num_drafts += num_drafted > 0
        self.num_drafted_tokens += num_drafted
        self.per_position += [0] * (num_drafted - len(self.per_position))
        for position in range(num_accepted):
            self.per_position[position] += 1


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the engine: its tokens, its blocks, and how far it is computed."""

    request_id: int
    request: Request
    arrival_time: float
    token_ids: list[int]  # prompt and generated
    num_prompt_tokens: int
    draft_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    prefix_entry: int = 0  # prefix cache entry of the last cached block (BlockManager)
    num_cached_blocks: int = 0  # leading blocks that the prefix cache knows
    row_slot: int | None = None  # row of the sampler's persistent tensors while running
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    acceptance: Acceptance = field(default_factory=Acceptance)
    acceptance_rate: AcceptanceRate = field(default_factory=AcceptanceRate)
    num_cached_prompt_tokens: int = 0
    prompt_outputs: list[TokenOutput] = field(default_factory=list)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens, drafts included, that the model has not seen."""
        return len(self.token_ids) + len(self.draft_ids) - self.num_computed_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the prompt is still to be scored; after a preemption in the answer it has been."""
        return self.request.sampling.prompt_logprobs and self.num_generated_tokens == 0
