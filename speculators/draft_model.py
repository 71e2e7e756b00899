"""A model that drafts: rows of its own tokens, their paged KV cache, and ragged forwards over some of them.

A row is some tokens behind, and catches up when it is drafted for; how it got behind (a prompt, steps without drafts,
rejected drafts, a text that is tokenized otherwise by now) makes no difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from specserve.models.block_manager import BlockManager
from specserve.models.causal_lm import CausalLM
from specserve.models.input_buffers import InputBuffers
from specserve.models.kv_cache import KVCache
from specserve.speculators.base import RowsRoom


@dataclass(slots=True, eq=False)
class DraftSequence:
    """One row. Behind the tokens of its context stand those drafted last, as far as they are in the cache."""

    token_ids: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_blocks: int = 0
    prefix_entry: int = 0
    num_known_blocks: int = 0  # of block_table, to the input buffers


@dataclass(frozen=True, slots=True)
class _Share:
    """A RaggedRow."""

    row_slot: int
    start: int
    token_ids: list[int]
    new_block_ids: list[int]
    num_logits: int


class DraftModel:
    """The rows that a draft model runs on; the cache is there from `allocate` on."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self._sequences: dict[int, DraftSequence] = {}

    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache that a token takes."""
        return KVCache.bytes_per_block(block_size=1, **self.model.kv_geometry)

    def allocate(self, room: RowsRoom) -> None:
        """Reserve the KV cache, and run once, so that no request has to wait for what is done only then."""
        # Another tokenizer may need more tokens for the same text; rows beyond this are not drafted for.
        most = min(self.model.config.context_length, 2 * room.max_total_tokens, room.num_blocks * room.block_size)
        device = next(self.model.parameters()).device
        self.max_tokens, self._max_batch_tokens = most, room.max_batch_tokens
        self._cache = KVCache.allocate(
            num_blocks=room.num_blocks, block_size=room.block_size, device=device, **self.model.kv_geometry
        )
        self._blocks = BlockManager(room.num_blocks, room.block_size)
        self._buffers = InputBuffers(
            max_rows=room.max_rows, max_blocks=-(-most // room.block_size), block_size=room.block_size, device=device
        )
        self.continue_as(0, [0])
        with torch.inference_mode():
            self.catch_up([0], [0], [0])
        self.release(0)

    def continue_as(self, row_slot: int, token_ids: Sequence[int]) -> None:
        """The tokens of a row are these now; what is computed of their beginning stays."""
        seq, new = self._sequences.setdefault(row_slot, DraftSequence()), list(token_ids)
        same = _num_same(seq.token_ids, new, seq.num_computed_tokens)
        if same < seq.num_cached_blocks * self._blocks.block_size:  # other rows may have those blocks too
            self._blocks.free(seq)
            self._buffers.release(row_slot)
            seq.num_known_blocks = same = 0
        seq.num_computed_tokens, seq.token_ids = same, new

    def release(self, row_slot: int) -> None:
        """Forget a row."""
        seq = self._sequences.pop(row_slot, None)
        if seq is not None:
            self._blocks.free(seq)
            self._buffers.release(row_slot)

    def catch_up(
        self, row_slots: Sequence[int], num_drafts: Sequence[int], num_final: Sequence[int]
    ) -> tuple[list[int], torch.Tensor]:
        """Compute all tokens of the rows -> indices of those that got to their end, states [n, E] of their last ones.

        num_drafts: tokens for which each needs room besides. num_final: leading tokens that won't change any more.
        Rows without room stay where they are; those that are far behind take several calls.
        """
        ready, shares, budget = [], [], self._max_batch_tokens
        for index, (row_slot, drafts) in enumerate(zip(row_slots, num_drafts, strict=True)):
            seq = self._sequences[row_slot]
            if not seq.block_table:
                self._blocks.adopt_prefix(seq, self._blocks.find_prefix(seq))
            num_tokens = len(seq.token_ids) + drafts
            if not budget or num_tokens > self.max_tokens or self._blocks.grow(seq, num_tokens) is None:
                continue
            start = min(seq.num_computed_tokens, len(seq.token_ids) - 1)
            count = min(len(seq.token_ids) - start, budget)
            budget -= count
            is_ready = start + count == len(seq.token_ids)
            shares.append(self._share(row_slot, start, count, num_logits=int(is_ready)))
            if is_ready:
                ready.append(index)
            # Marked before they are computed, which they are below.
            self._blocks.cache_computed(seq, num_final[index])
        if not shares:
            return [], torch.empty(0)
        return ready, self._run(shares)

    def append(self, row_slots: Sequence[int], token_ids: Sequence[int]) -> torch.Tensor:
        """One more token, which there was room for, for each of some rows that are computed -> states [n, E]."""
        shares = []
        for row_slot, token_id in zip(row_slots, token_ids, strict=True):
            seq = self._sequences[row_slot]
            seq.token_ids.append(token_id)
            shares.append(self._share(row_slot, len(seq.token_ids) - 1, 1, num_logits=1))
        return self._run(shares)

    def check_integrity(self) -> None:
        """Assert that blocks are where they should be; for tests."""
        self._blocks.check_integrity(self._sequences.values())

    def _share(self, row_slot: int, start: int, count: int, *, num_logits: int) -> _Share:
        seq = self._sequences[row_slot]
        new_blocks = seq.block_table[seq.num_known_blocks :]
        seq.num_known_blocks = len(seq.block_table)
        seq.num_computed_tokens = start + count
        return _Share(row_slot, start, seq.token_ids[start : start + count], new_blocks, num_logits)

    def _run(self, shares: list[_Share]) -> torch.Tensor:
        batch = self._buffers.load(shares)
        batch.check()
        hidden: torch.Tensor = self.model(batch, self._cache)[batch.logits_indices]
        return hidden


def _num_same(old: list[int], new: list[int], most: int) -> int:
    """Equal leading tokens, `most` at most; they hardly ever differ, and then near the end."""
    most = same = min(most, len(old), len(new))
    step = 1
    while old[:same] != new[:same]:
        same, step = max(0, same - step), 2 * step
    while same < most and old[same] == new[same]:
        same += 1
    return same
