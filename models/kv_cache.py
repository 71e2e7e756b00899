"""The paged KV cache of one rank."""

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class KVCache:
    """Keys and values of all layers: `keys[l]` and `values[l]` are [P, T, Hkv, D] and contiguous."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @classmethod
    def allocate(
        cls,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "KVCache":
        """Reserve zeroed blocks, so that a stray read gives 0 and never NaN."""
        shape = (num_blocks, block_size, num_kv_heads, head_dim)

        def layer() -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls([layer() for _ in range(num_layers)], [layer() for _ in range(num_layers)])

    @property
    def block_size(self) -> int:
        """Tokens a block (T)."""
        return self.keys[0].shape[1]

    @property
    def num_blocks(self) -> int:
        """Blocks (P)."""
        return self.keys[0].shape[0]

    @staticmethod
    def bytes_per_block(
        *, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes that one block takes over all layers, keys and values together."""
        return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize
