"""The interface of all models."""

import torch
from torch import nn

from specserve.models.attention.base import AttentionBackend
from specserve.models.config import ModelConfig
from specserve.models.forward_batch import ForwardBatch
from specserve.models.kv_cache import KVCache
from specserve.models.layers.embedding import VocabParallelEmbedding, VocabParallelHead, load_vocabulary_slice
from specserve.models.layers.linear import Projection, shard_units
from specserve.models.parallel import TensorParallel
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
        self.attention = attention
        kv_heads = Projection("k_proj", config.num_kv_heads, config.head_dim, replicates=True)
        _, self.num_kv_heads = shard_units(kv_heads, parallel)
        self._load_vocabulary(reader, parallel)

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        """Hidden states [N, E] after the final norm; writes the keys and values of the batch into the cache."""
        raise NotImplementedError

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
        head_rows = rows
        if not tied or (reader.has(head) and not only_head):
            head_rows = load(head)
            if tied and torch.equal(head_rows, rows):
                head_rows = rows
        self.embed_tokens = VocabParallelEmbedding(rows, parallel)
        self.head = VocabParallelHead(head_rows, config.vocab_size, parallel)
