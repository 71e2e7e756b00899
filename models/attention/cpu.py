"""Attention on CPUs: a C kernel that reads the paged cache in place."""

import torch

from specserve.models.cpu_kernels import binding
from specserve.models.forward_batch import ForwardBatch


class CpuAttention:
    """A row's result is the same bits in any batch and any chunking."""

    name = "cpu"

    def __init__(self) -> None:
        binding.kernels()  # or the error that says why not
        self._struct = binding.AttentionBatch()  # always the same one: tapes know its address

    def prepare(self, batch: ForwardBatch) -> None:
        """Collect the addresses once a forward; they stay valid as long as the batch does."""
        assert batch.slot_mapping.dtype is torch.int64 and batch.slot_mapping.is_contiguous()
        for tensor in (batch.block_tables, batch.cu_seqlens_q, batch.seq_lens):
            assert tensor.dtype is torch.int32 and tensor.is_contiguous()
        struct = self._struct
        struct.num_tokens, struct.num_seqs = batch.input_ids.shape[0], batch.seq_lens.shape[0]
        struct.max_blocks = batch.block_tables.shape[1]
        struct.slot_mapping, struct.block_tables = batch.slot_mapping.data_ptr(), batch.block_tables.data_ptr()
        struct.cu_seqlens_q, struct.seq_lens = batch.cu_seqlens_q.data_ptr(), batch.seq_lens.data_ptr()
        struct.num_threads = torch.get_num_threads()

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
        assert all(binding.takes_heads(x) for x in (q, k, v))
        struct = self._struct
        struct.num_heads, struct.num_kv_heads, struct.head_dim = q.shape[1], k.shape[1], q.shape[2]
        struct.block_size = key_cache.shape[1]
        return binding.paged_attention(
            struct, q, k, v, key_cache, value_cache, scale=scale, sliding_window=sliding_window
        )
