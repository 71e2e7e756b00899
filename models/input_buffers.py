"""Turns the plain ints of a step into the tensors of a ForwardBatch."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from specserve.models.forward_batch import ForwardBatch


class RaggedRow(Protocol):
    """One sequence's share of a forward: token_ids are computed at positions start, start + 1, …"""

    @property
    def row_slot(self) -> int:
        """Under which its block table is kept."""
        ...

    @property
    def start(self) -> int:
        """Position of the first token."""
        ...

    @property
    def token_ids(self) -> list[int]:
        """At least one."""
        ...

    @property
    def new_block_ids(self) -> list[int]:
        """Appended to the block table of the row slot."""
        ...

    @property
    def num_logits(self) -> int:
        """So many of the last tokens decide a next one."""
        ...


class InputBuffers:
    """Keeps the block table of each row slot, so that a step brings only new blocks."""

    def __init__(self, *, max_rows: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self._block_tables = np.zeros((max_rows, max_blocks), dtype=np.int32)
        self._num_blocks = np.zeros(max_rows, dtype=np.int64)
        self._block_size = block_size
        self._device = device

    def release(self, row_slot: int) -> None:
        """Forget the block table of a row slot."""
        self._num_blocks[row_slot] = 0

    def load(self, rows: Sequence[RaggedRow]) -> ForwardBatch:
        """The batch of one step, a sequence a row, with a logits row for each token that decides a next one."""
        for row in rows:
            held = self._num_blocks[row.row_slot]
            self._block_tables[row.row_slot, held : held + len(row.new_block_ids)] = row.new_block_ids
            self._num_blocks[row.row_slot] = held + len(row.new_block_ids)
        row_slots = np.fromiter((row.row_slot for row in rows), np.int64, len(rows))
        starts = np.fromiter((row.start for row in rows), np.int64, len(rows))
        lens = np.fromiter((len(row.token_ids) for row in rows), np.int64, len(rows))
        num_logits = np.fromiter((row.num_logits for row in rows), np.int64, len(rows))
        cu_seqlens = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(lens, out=cu_seqlens[1:])
        offsets = np.arange(cu_seqlens[-1])
        positions = np.repeat(starts - cu_seqlens[:-1], lens) + offsets
        block_ids = self._block_tables[np.repeat(row_slots, lens), positions // self._block_size].astype(np.int64)
        used_blocks = int(self._num_blocks[row_slots].max())
        return ForwardBatch(
            input_ids=self._tensor(np.concatenate([np.asarray(row.token_ids, dtype=np.int64) for row in rows])),
            positions=self._tensor(positions),
            slot_mapping=self._tensor(block_ids * self._block_size + positions % self._block_size),
            block_tables=self._tensor(self._block_tables[row_slots, :used_blocks]),
            cu_seqlens_q=self._tensor(cu_seqlens),
            seq_lens=self._tensor((starts + lens).astype(np.int32)),
            max_seqlen_q=int(lens.max()),
            max_seqlen_k=int((starts + lens).max()),
            logits_indices=self._tensor(_last_of_each(cu_seqlens[1:], num_logits)),
        )

    def _tensor(self, array: NDArray[np.generic]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._device.type == "cuda":
            tensor = tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor


def _last_of_each(ends: NDArray[np.int32], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """[B] ends and counts -> the counts[b] indices before ends[b], for each b, flattened."""
    total = int(counts.sum())
    firsts = np.repeat(ends.astype(np.int64) - counts, counts)
    indices: NDArray[np.int64] = firsts + np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    return indices
