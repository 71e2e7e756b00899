"""FlashAttention on GPUs, over the paged cache."""

import torch
from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found, unused-ignore]

from specserve.models.attention.torch import write_kv
from specserve.models.forward_batch import ForwardBatch


class FlashAttention:
    """One flash_attn_varlen_func call a layer, for all sequences of the batch."""

    name = "flash"

    def prepare(self, batch: ForwardBatch) -> None:
        """Sum the lengths of the keys, which the varlen call wants beside the block tables."""
        self._cu_seqlens_k = torch.nn.functional.pad(batch.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))

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
        """See AttentionBackend."""
        write_kv(k, v, key_cache, value_cache, batch.slot_mapping)
        out: torch.Tensor = flash_attn_varlen_func(
            q,
            key_cache,
            value_cache,
            cu_seqlens_q=batch.cu_seqlens_q,
            cu_seqlens_k=self._cu_seqlens_k,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=batch.max_seqlen_k,
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1) if sliding_window is None else (sliding_window - 1, 0),
            block_table=batch.block_tables,
        )
        return out
