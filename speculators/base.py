"""The interface of all speculators."""

from __future__ import annotations  # torch is not loaded for the sake of SpeculatorType

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class SpeculatorType(enum.StrEnum):
    """What drafts tokens; the only selector of a speculator."""

    NONE = "none"
    MEDUSA = "medusa"
    MLP = "mlp"
    USD = "usd"


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed continuations: of row b the first lengths[b] of token_ids[b].

    `probs` is None where the tokens follow from the prefix (and the noise of the target's own draw, which is
    coupled); else it is the law that token_ids was drawn from, [B, K, V], exactly. Drafts are chains; a tree would
    add the index of each token's parent here. Whether a token is submitted must not depend on that token.
    """

    token_ids: torch.Tensor  # [B, K] int64, ids of the target
    lengths: list[int]
    probs: torch.Tensor | None = None

    def rows(self) -> list[list[int]]:
        """The drafted tokens of each row."""
        return [row[:length] for row, length in zip(self.token_ids.tolist(), self.lengths, strict=True)]


@dataclass(frozen=True, slots=True)
class ProposalInput:
    """The rows to draft for, right after their last token was emitted.

    `choose(logits [B, Vd], step, target_ids)` picks from a head's logits the token at draft position `step` of each
    row as the target picks its own: the likeliest one or, where the request samples, a draw with the same noise that
    the target will draw with. target_ids [Vd] are the ids that the columns stand for, None where they are the ids.
    It gives columns [B].
    """

    row_slots: list[int]
    token_ids: torch.Tensor  # [B] int64: the last token, really emitted
    hidden: torch.Tensor  # [B, E]: the state after the final norm that it was drawn from
    max_lengths: list[int]  # drafts wanted, at most
    choose: Callable[[torch.Tensor, int, torch.Tensor | None], torch.Tensor]

    def check(self) -> None:
        """Assert the shapes (one of the four seams where they are asserted)."""
        num_rows = len(self.row_slots)
        assert self.token_ids.shape == (num_rows,) and self.hidden.shape[:1] == (num_rows,)
        assert len(self.max_lengths) == num_rows and all(length > 0 for length in self.max_lengths)


class Speculator(Protocol):
    """Drafts tokens that the target then verifies."""

    max_draft_tokens: int  # K
    num_parameters: int

    def propose(self, rows: ProposalInput) -> Draft:
        """At least one row; draft up to max_lengths[b] tokens for row b."""
        ...


class NoSpeculator:
    """Drafts nothing."""

    max_draft_tokens = 0
    num_parameters = 0

    def propose(self, rows: ProposalInput) -> Draft:
        """See Speculator."""
        num_rows = len(rows.row_slots)
        return Draft(rows.token_ids.new_empty(num_rows, 0), [0] * num_rows)
