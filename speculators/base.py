"""The interface of all speculators."""

from __future__ import annotations  # torch is not loaded for the sake of SpeculatorType

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from specserve.models.layers.embedding import VocabParallelHead


class SpeculatorType(enum.StrEnum):
    """What drafts tokens; the only selector of a speculator."""

    NONE = "none"
    MEDUSA = "medusa"
    MLP = "mlp"
    USD = "usd"


class UsdMethod(enum.StrEnum):
    """How usd turns drafts into tokens of the target (usd.py); auto takes tli where the vocabularies share enough."""

    AUTO = "auto"
    TLI = "tli"
    SLEM = "slem"


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
    is_routine: bool = True  # not if drafting took longer this time, for what had been left undone before

    def rows(self) -> list[list[int]]:
        """The drafted tokens of each row."""
        return [row[:length] for row, length in zip(self.token_ids.tolist(), self.lengths, strict=True)]


class Choose(Protocol):
    """See ProposalInput."""

    def __call__(
        self,
        logits: torch.Tensor,
        step: int,
        target_ids: torch.Tensor | None = None,
        indices: Sequence[int] | None = None,
        head: VocabParallelHead | None = None,
    ) -> torch.Tensor:
        """Columns [n]."""
        ...


@dataclass(frozen=True, slots=True)
class RowsRoom:
    """What a KV cache of a speculator's own must hold."""

    num_blocks: int
    block_size: int
    max_rows: int
    max_total_tokens: int  # of a row, in tokens of the target
    max_batch_tokens: int  # of a forward


@dataclass(frozen=True, slots=True)
class ProposalInput:
    """The rows to draft for, right after their last token was emitted.

    `choose(logits [n, Vd], step, target_ids, indices, head)` picks from a head's logits the token at draft position
    `step` as the target picks its own: the likeliest one or, where the request samples, a draw with the same noise that
    the target will draw with. target_ids [Vd] are the ids that the columns stand for, None where they are the ids;
    indices are the n rows, None for all of them. With a head the logits are what its `local` gave on this rank; the
    choice is made over all ranks. It gives columns [n].
    """

    row_slots: list[int]
    token_ids: torch.Tensor  # [B] int64: the last token, really emitted
    hidden: torch.Tensor  # [B, E]: the state after the final norm that it was drawn from
    max_lengths: list[int]  # drafts wanted, at most
    choose: Choose
    min_gain: float = 0.0  # tokens that another round of drafting must bring, over all rows, for its time to pay

    def check(self) -> None:
        """Assert the shapes (one of the four seams where they are asserted)."""
        num_rows = len(self.row_slots)
        assert self.token_ids.shape == (num_rows,) and self.hidden.shape[:1] == (num_rows,)
        assert len(self.max_lengths) == num_rows and all(length > 0 for length in self.max_lengths)


class Speculator:
    """Drafts tokens that the target then verifies.

    One that keeps a state for each row, like a model of its own with a KV cache, is told what happens to the rows.
    """

    max_draft_tokens: int  # K
    num_parameters: int
    method: UsdMethod | None = None  # of usd: what it takes where a request leaves it open

    def propose(self, rows: ProposalInput) -> Draft:
        """At least one row; draft up to max_lengths[b] tokens for row b."""
        raise NotImplementedError

    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache of its own that go with each token of the target's."""
        return 0

    def allocate(self, room: RowsRoom) -> None:
        """Reserve the cache; called once, before the first row."""

    def admit(self, row_slot: int, token_ids: list[int], method: UsdMethod | None = None) -> None:
        """A sequence with these tokens has entered the batch; its request asks for a method, or leaves it open."""

    def accept(self, row_slot: int, token_ids: list[int]) -> None:
        """These tokens were emitted behind those that are known already."""

    def release(self, row_slot: int) -> None:
        """The sequence has left, or its place is needed."""


class NoSpeculator(Speculator):
    """Drafts nothing."""

    max_draft_tokens = 0
    num_parameters = 0

    def propose(self, rows: ProposalInput) -> Draft:
        """See Speculator."""
        num_rows = len(rows.row_slots)
        return Draft(rows.token_ids.new_empty(num_rows, 0), [0] * num_rows)
