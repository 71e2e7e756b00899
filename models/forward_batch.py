"""The input of one forward: ragged sequences, flattened.

Shape alphabet, used in every shape comment of this project: B sequences, N flattened query tokens, R logits
rows, K drafts, V vocabulary, E hidden, F mlp, Hq/Hkv heads on this rank, D head size, L layers, P blocks,
T block size.
"""

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class ForwardBatch:
    """Sequence b owns query tokens cu_seqlens_q[b] .. cu_seqlens_q[b+1]; they are its last ones.

    All tensors are on the model's device. Padding of block_tables is any valid block id (0).
    """

    input_ids: torch.Tensor  # [N] int64
    positions: torch.Tensor  # [N] int64
    slot_mapping: torch.Tensor  # [N] int64: block * T + offset, where this token's K and V are written
    block_tables: torch.Tensor  # [B, max_blocks] int32
    cu_seqlens_q: torch.Tensor  # [B+1] int32
    seq_lens: torch.Tensor  # [B] int32: tokens in the cache after this forward (cached + query)
    max_seqlen_q: int
    max_seqlen_k: int
    logits_indices: torch.Tensor  # [R] int64 into N

    def check(self) -> None:
        """Assert the shapes (one of the four seams where they are asserted)."""
        num_tokens, num_seqs = self.input_ids.shape[0], self.seq_lens.shape[0]
        assert self.positions.shape == self.slot_mapping.shape == (num_tokens,)
        assert self.cu_seqlens_q.shape == (num_seqs + 1,)
        assert self.block_tables.ndim == 2 and self.block_tables.shape[0] == num_seqs
        assert self.logits_indices.ndim == 1
        assert 1 <= self.max_seqlen_q <= num_tokens
