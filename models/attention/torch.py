"""Attention in plain torch, on any device: the reference for the others."""

import torch
import torch.nn.functional as F

from specserve.models.forward_batch import ForwardBatch


def write_kv(
    k: torch.Tensor, v: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Put k and v ([N, Hkv, D]) where slot_mapping says."""
    key_cache.flatten(0, 1).index_copy_(0, slot_mapping, k)
    value_cache.flatten(0, 1).index_copy_(0, slot_mapping, v)


class TorchAttention:
    """Gathers the keys and values of one sequence after the other and calls scaled_dot_product_attention."""

    name = "torch"

    def prepare(self, batch: ForwardBatch) -> None:
        """Fetch the lengths to the host once, not once a layer."""
        self._seq_lens: list[int] = batch.seq_lens.tolist()
        self._bounds: list[int] = batch.cu_seqlens_q.tolist()

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
        out = torch.empty_like(q)
        for index in range(len(self._seq_lens)):
            self.attend_one(index, q, key_cache, value_cache, batch, out, scale, sliding_window)
        return out

    def attend_one(
        self,
        index: int,
        q: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: ForwardBatch,
        out: torch.Tensor,
        scale: float,
        sliding_window: int | None,
    ) -> None:
        """Attention of sequence `index` alone, into its part of `out` ([N, Hq, D])."""
        seq_len, start, end = self._seq_lens[index], self._bounds[index], self._bounds[index + 1]
        num_blocks = -(-seq_len // key_cache.shape[1])
        blocks = batch.block_tables[index, :num_blocks]
        keys = key_cache[blocks].flatten(0, 1)[:seq_len].transpose(0, 1)  # [Hkv, S, D]
        values = value_cache[blocks].flatten(0, 1)[:seq_len].transpose(0, 1)
        queries = q[start:end].transpose(0, 1)  # [Hq, len_q, D]
        mask = _mask(end - start, seq_len, sliding_window, q.device)
        attended = F.scaled_dot_product_attention(
            queries[None], keys[None], values[None], attn_mask=mask, scale=scale, enable_gqa=True
        )
        out[start:end] = attended[0].transpose(0, 1)


def _mask(len_q: int, seq_len: int, sliding_window: int | None, device: torch.device) -> torch.Tensor | None:
    """[len_q, seq_len] bool, true where a query sees a key; None if it sees all."""
    if len_q == 1 and (sliding_window is None or seq_len <= sliding_window):
        return None
    query_positions = torch.arange(seq_len - len_q, seq_len, device=device)[:, None]
    key_positions = torch.arange(seq_len, device=device)[None]
    mask = key_positions <= query_positions
    if sliding_window is not None:
        mask &= query_positions - key_positions < sliding_window
    return mask
