"""Attention of the decode step on CPUs: a C kernel that reads the paged cache in place."""

import ctypes

import torch

from specserve.models.attention.torch import TorchAttention
from specserve.models.cpu_kernels import binding
from specserve.models.forward_batch import ForwardBatch

# Rows with more query tokens are matrix products, which torch does better than the kernel.
MAX_QUERY_LEN = 16


class CpuAttention(TorchAttention):
    """The kernel for rows with few query tokens (decoding, verification), torch for chunks of prompts."""

    name = "cpu"

    def __init__(self) -> None:
        self._kernels = binding.kernels()

    def prepare(self, batch: ForwardBatch) -> None:
        """Collect the addresses once a forward; they stay valid as long as the batch does."""
        super().prepare(batch)
        assert batch.slot_mapping.dtype is torch.int64 and batch.slot_mapping.is_contiguous()
        for tensor in (batch.block_tables, batch.cu_seqlens_q, batch.seq_lens):
            assert tensor.dtype is torch.int32 and tensor.is_contiguous()
        self._struct = binding.AttentionBatch(
            num_tokens=batch.input_ids.shape[0],
            num_seqs=batch.seq_lens.shape[0],
            max_blocks=batch.block_tables.shape[1],
            max_query_len=MAX_QUERY_LEN,
            slot_mapping=batch.slot_mapping.data_ptr(),
            block_tables=batch.block_tables.data_ptr(),
            cu_seqlens_q=batch.cu_seqlens_q.data_ptr(),
            seq_lens=batch.seq_lens.data_ptr(),
            num_threads=torch.get_num_threads(),
        )
        bounds = self._bounds
        self._chunks = [b for b in range(len(bounds) - 1) if bounds[b + 1] - bounds[b] > MAX_QUERY_LEN]

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: ForwardBatch,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """See AttentionBackend. q, k and v may be slices of a packed projection."""
        num_tokens, num_heads, head_dim = q.shape
        assert all(_has_heads_side_by_side(x) for x in (q, k, v))
        struct = self._struct
        struct.num_heads, struct.num_kv_heads, struct.head_dim = num_heads, k.shape[1], head_dim
        struct.block_size = key_cache.shape[1]
        out = q.new_empty(num_tokens, num_heads, head_dim)
        if self._kernels.paged_attention(
            ctypes.byref(struct),
            *(address for x in (q, k, v) for address in (x.data_ptr(), x.stride(0))),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            scale,
            sliding_window or 0,
            out.data_ptr(),
        ):
            raise MemoryError("no memory for the partial results of the attention kernel")
        for index in self._chunks:
            self.attend_one(index, q, key_cache, value_cache, batch, out, scale, sliding_window)
        return out


def _has_heads_side_by_side(x: torch.Tensor) -> bool:
    """Whether the kernel can read [N, H, D] row by row, however far apart the rows are."""
    return x.dtype is torch.float32 and x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])
