"""The interface of all models."""

from typing import Any

import torch
from torch import nn

from specserve.models.attention.base import AttentionBackend
from specserve.models.config import ModelConfig
from specserve.models.forward_batch import ForwardBatch
from specserve.models.kv_cache import KVCache
from specserve.models.layers.embedding import VocabParallelEmbedding, VocabParallelHead, load_vocabulary_slice
from specserve.models.layers.linear import share_heads
from specserve.models.layers.matrix import Matrix
from specserve.models.layers.rotary import RotaryEmbedding
from specserve.models.parallel import TensorParallel
from specserve.models.replay import ReplayedDecode, Rotaries
from specserve.models.weights import WeightReader


class CausalLM(nn.Module):
    """A decoder with its embedding and head on one rank; a family adds its layers and `forward`.

    `num_kv_heads` counts this rank's, in every layer.
    Constructing it loads the weights; the caller checks the account with `WeightReader.finish`.
    """

    def __init__(
        self, config: ModelConfig, reader: WeightReader, parallel: TensorParallel, attention: AttentionBackend
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = reader.dtype  # of states and KV cache, and of weights unless they are quantized
        self.attention = attention
        _, (_, self.num_kv_heads) = share_heads(config.num_heads, config.num_kv_heads, parallel)
        self.parallel = parallel
        self._load_vocabulary(reader, parallel)
        can_replay = attention.name == "cpu" and parallel.can_replay
        self.replays = ReplayedDecode(self.decode) if can_replay else None

    @property
    def rotaries(self) -> tuple[RotaryEmbedding, ...]:
        """The rotary embeddings of the layers."""
        raise NotImplementedError

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[N] -> [N, E], what goes into the first layer."""
        embedded: torch.Tensor = self.embed_tokens(input_ids)
        return embedded

    def decode(
        self, residual: torch.Tensor, rotaries: Rotaries, batch: ForwardBatch, kv_cache: KVCache
    ) -> torch.Tensor:
        """The layers and the final norm: embedded tokens [N, E] -> hidden states [N, E].

        `rotaries` holds the cosines and sines of `self.rotaries`. Under the CPU kernels this must be made of kernel
        calls and views only (models/replay.py).
        """
        raise NotImplementedError

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        """Hidden states [N, E] after the final norm; writes the keys and values of the batch into the cache.

        They may be overwritten by the next forward.
        """
        self.attention.prepare(batch)
        embedded = self.embed(batch.input_ids)
        rotaries = tuple(rotary(batch.positions) for rotary in self.rotaries)
        if self.replays is None or not self.replays.takes(batch):
            return self.decode(embedded, rotaries, batch, kv_cache)
        return self.replays.decode(embedded, rotaries, batch, kv_cache)

    @property
    def kv_geometry(self) -> dict[str, Any]:
        """What KVCache needs to know of a model."""
        return {
            "num_layers": self.config.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.config.head_dim,
            "dtype": self.dtype,
        }

    def quantize(self) -> None:
        """Keep int8 weights from now on; before the first forward."""
        for module in self.modules():
            if isinstance(module, Matrix):
                module.quantize()

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, E] -> [R, V] float32."""
        logits: torch.Tensor = self.head(hidden)
        return logits

    def _load_vocabulary(self, reader: WeightReader, parallel: TensorParallel) -> None:
        """Embedding and head, tied as transformers ties them: one stands for both unless both are there and differ."""
        config, embedding, head = self.config, "model.embed_tokens.weight", "lm_head.weight"

        def load(name: str) -> nn.Parameter:
            return load_vocabulary_slice(reader, name, config.vocab_size, config.hidden_size, parallel)

        tied = config.tie_word_embeddings
        only_head = tied and reader.has(head) and not reader.has(embedding)
        rows = load(head if only_head else embedding)
        head_rows = load(head) if not tied or (reader.has(head) and not only_head) else rows
        is_shared = head_rows is rows or (tied and (rows.is_meta or torch.equal(head_rows, rows)))
        embedding_matrix = Matrix(rows, multiplies=is_shared)
        head_matrix = embedding_matrix if is_shared else Matrix(head_rows)
        self.embed_tokens = VocabParallelEmbedding(embedding_matrix, parallel)
        self.head = VocabParallelHead(head_matrix, config.vocab_size, parallel)
