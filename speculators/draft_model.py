"""A model that drafts: rows of its own tokens, their paged KV cache, and ragged forwards over some of them.

A row is some tokens behind, and catches up when it is drafted for; how it got behind (a prompt, steps without drafts,
rejected drafts, a text that is tokenized otherwise by now) makes no difference.

Only rank 0 knows the rows. Where the model is split, it tells the other ranks each forward, and they compute along.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from specserve.models.block_manager import BlockManager
from specserve.models.causal_lm import CausalLM
from specserve.models.input_buffers import InputBuffers
from specserve.models.kv_cache import KVCache
from specserve.models.layers.embedding import VocabParallelHead
from specserve.models.link import Ints
from specserve.speculators.base import Draft, ProposalInput, RowsRoom, Speculator


@dataclass(slots=True, eq=False)
class DraftSequence:
    """One row. Behind the tokens of its context stand those drafted last, as far as they are in the cache."""

    head: int
    token_ids: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_blocks: int = 0
    prefix_entry: int = 0
    num_known_blocks: int = 0  # of block_table, to the input buffers


@dataclass(frozen=True, slots=True)
class Share:
    """A RaggedRow. Its new blocks stand behind num_known_blocks older ones; its logits are those of a head."""

    row_slot: int
    start: int
    token_ids: list[int]
    new_block_ids: list[int]
    num_known_blocks: int
    num_logits: int
    head: int


# By the index of a head: logits [n, V] of the rows that have it, in their order, if there are any.
Logits = dict[int, torch.Tensor]


class DraftModel:
    """The rows that a draft model runs on; the cache is there from `allocate` on."""

    def __init__(self, model: CausalLM, heads: Sequence[VocabParallelHead]) -> None:
        self.model, self._heads = model, heads
        self._link = model.parallel.link
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
        with torch.inference_mode():
            for head in range(len(self._heads)):
                self._compute([Share(0, 0, [0], [0], 0, 1, head)])

    def continue_as(self, row_slot: int, token_ids: Sequence[int], head: int = 0) -> None:
        """The tokens of a row are these now; what is computed of their beginning stays. Its head stays as at first."""
        seq, new = self._sequences.setdefault(row_slot, DraftSequence(head)), list(token_ids)
        same = _num_same(seq.token_ids, new, seq.num_computed_tokens)
        if same < seq.num_cached_blocks * self._blocks.block_size:  # other rows may have those blocks too
            self._blocks.free(seq)
            seq.num_known_blocks = same = 0
        seq.num_computed_tokens, seq.token_ids = same, new

    def release(self, row_slot: int) -> None:
        """Forget a row."""
        seq = self._sequences.pop(row_slot, None)
        if seq is not None:
            self._blocks.free(seq)

    def catch_up(
        self, row_slots: Sequence[int], num_drafts: Sequence[int], num_final: Sequence[int]
    ) -> tuple[list[int], Logits]:
        """Compute all tokens of the rows -> indices of those that got to their end, logits behind these.

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
            return [], {}
        return ready, self._run(shares)

    def append(self, row_slots: Sequence[int], token_ids: Sequence[int]) -> Logits:
        """One more token, which there was room for, for each of some rows that are computed -> logits behind them."""
        shares = []
        for row_slot, token_id in zip(row_slots, token_ids, strict=True):
            seq = self._sequences[row_slot]
            seq.token_ids.append(token_id)
            shares.append(self._share(row_slot, len(seq.token_ids) - 1, 1, num_logits=1))
        return self._run(shares)

    def end(self) -> None:
        """The last forward of a step was done; lets the ranks go that follow."""
        self._link.share(())

    def follow(self) -> None:
        """On another rank: compute along, to the end of rank 0's step."""
        while len(message := self._link.share(None)):
            self._compute(decode(message))

    def check_integrity(self) -> None:
        """Assert that blocks are where they should be; for tests."""
        self._blocks.check_integrity(self._sequences.values())

    def _share(self, row_slot: int, start: int, count: int, *, num_logits: int) -> Share:
        seq = self._sequences[row_slot]
        num_known, seq.num_known_blocks = seq.num_known_blocks, len(seq.block_table)
        seq.num_computed_tokens = start + count
        token_ids, new_block_ids = seq.token_ids[start : start + count], seq.block_table[num_known:]
        return Share(row_slot, start, token_ids, new_block_ids, num_known, num_logits, seq.head)

    def _run(self, shares: list[Share]) -> Logits:
        if self._link.group is not None:
            self._link.share(encode(shares))
        return self._compute(shares)

    def _compute(self, shares: list[Share]) -> Logits:
        for share in shares:
            if not share.num_known_blocks:
                self._buffers.release(share.row_slot)
        batch = self._buffers.load(shares)
        batch.check()
        hidden = self.model(batch, self._cache)[batch.logits_indices]
        heads = [share.head for share in shares for _ in range(share.num_logits)]
        own = {head: [place for place, other in enumerate(heads) if other == head] for head in sorted(set(heads))}
        return {
            head: self._heads[head](hidden if len(places) == len(heads) else hidden[places])
            for head, places in own.items()
        }


class FollowingDraftModel(Speculator):
    """What a rank that follows has of a draft model split over the ranks."""

    max_draft_tokens = 0

    def __init__(self, model: DraftModel, num_parameters: int) -> None:
        self._model, self.num_parameters = model, num_parameters

    def kv_bytes_per_token(self) -> int:
        """See Speculator."""
        return self._model.kv_bytes_per_token()

    def allocate(self, room: RowsRoom) -> None:
        """See Speculator."""
        self._model.allocate(room)

    def propose(self, rows: ProposalInput) -> Draft:
        """See Speculator; rank 0 alone knows the drafts."""
        self._model.follow()
        num_rows = len(rows.row_slots)
        return Draft(rows.token_ids.new_empty(num_rows, 0), [0] * num_rows)


def encode(shares: Sequence[Share]) -> Ints:
    """As ints; see decode."""
    numbers: list[int] = []
    for share in shares:
        counts = (len(share.token_ids), len(share.new_block_ids), share.num_known_blocks, share.num_logits, share.head)
        numbers += (share.row_slot, share.start, *counts, *share.token_ids, *share.new_block_ids)
    return np.array(numbers, dtype=np.int64)


def decode(message: Ints) -> list[Share]:
    """What was encoded."""
    numbers, shares = iter(message.tolist()), []
    for row_slot in numbers:
        start, num_tokens, num_blocks, *others = itertools.islice(numbers, 6)
        token_ids, new_block_ids = (list(itertools.islice(numbers, count)) for count in (num_tokens, num_blocks))
        shares.append(Share(row_slot, start, token_ids, new_block_ids, *others))
    return shares


def _num_same(old: list[int], new: list[int], most: int) -> int:
    """Equal leading tokens, `most` at most; they hardly ever differ, and then near the end."""
    most = same = min(most, len(old), len(new))
    step = 1
    while old[:same] != new[:same]:
        same, step = max(0, same - step), 2 * step
    while same < most and old[same] == new[same]:
        same += 1
    return same
