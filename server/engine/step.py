"""What the scheduler tells the workers and what they answer: plain ints, nothing that grows with the context.

A worker keeps each running sequence under a row slot; it learns the tokens and the sampling once, on
admission, and from then on only what is new.
"""

from dataclasses import dataclass, field

from specserve.models.sampling.params import SampledToken, SamplingParams
from specserve.speculators.base import UsdMethod


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence enters (or, after a preemption, enters again) the batch under `row_slot`."""

    row_slot: int
    sampling: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    usd_method: UsdMethod | None = None


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """One sequence's share of a step: token_ids are computed at positions start, start + 1, …"""

    row_slot: int
    start: int
    token_ids: list[int]  # the last num_drafts of them are drafts
    new_block_ids: list[int]  # appended to the block table of the row slot
    num_drafts: int
    samples: bool  # whether the share reaches the end of the sequence, so that tokens come out
    prompt_logprobs: bool
    max_draft_tokens: int  # how many tokens may be drafted after this step; 0: none

    @property
    def num_tokens(self) -> int:
        """Query tokens of this row."""
        return len(self.token_ids)

    @property
    def num_logits(self) -> int:
        """Rows of logits: behind each draft and the token before them."""
        return (self.num_drafts + 1) * self.samples


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step. Releases are applied before admissions, admissions before rows."""

    released: list[int]
    admissions: list[Admission]
    rows: list[ScheduledRow]
    min_gain: float = 0.0  # see ProposalInput


@dataclass(slots=True)
class RowOutput:
    """What came out of one row, in the order of ScheduledBatch.rows.

    `tokens` holds the accepted drafts and one more token (empty for a partial prompt); a token without an id
    marks non-finite logits. `prompt` scores the prompt tokens at start + 1, start + 2, … of this share.
    """

    tokens: list[SampledToken] = field(default_factory=list)
    num_accepted: int = 0
    draft_ids: list[int] = field(default_factory=list)
    prompt: list[SampledToken] = field(default_factory=list)


@dataclass(slots=True)
class StepOutput:
    """The rows of one step, and how long drafting took in it; that isn't typical where it isn't routine (see Draft)."""

    rows: list[RowOutput]
    draft_seconds: float = 0.0
    is_routine: bool = True
