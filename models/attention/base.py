"""What a model needs of attention; one backend serves all layers."""

from typing import Protocol

import torch

from specserve.models.forward_batch import ForwardBatch


class AttentionBackend(Protocol):
    """Causal attention over the paged cache."""

    name: str

    def prepare(self, batch: ForwardBatch) -> None:
        """Work out, once a forward, what all layers share."""
        ...

    def forward(
        self,
        q: torch.Tensor,  # [N, Hq, D]
        k: torch.Tensor,  # [N, Hkv, D]
        v: torch.Tensor,  # [N, Hkv, D]
        key_cache: torch.Tensor,  # [P, T, Hkv, D]
        value_cache: torch.Tensor,  # [P, T, Hkv, D]
        batch: ForwardBatch,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """Write k and v to batch.slot_mapping, then attend; [N, Hq, D].

        Query i of sequence b stands at position seq_lens[b] - len_q[b] + i and sees itself and what is before
        it; with a sliding window w only the w positions ending with its own.
        """
        ...
