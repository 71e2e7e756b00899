"""Qwen3 (dense)."""

import torch

from specserve.models.attention.base import AttentionBackend
from specserve.models.config import ModelConfig
from specserve.models.layers.norm import HeadNorm
from specserve.models.llama import Attention, DecoderLayer, Llama
from specserve.models.parallel import TensorParallel
from specserve.models.weights import WeightReader


class Qwen3Attention(Attention):
    """Normalises each head of q and k before the rotation."""

    unit_offset = False  # of the norms

    def __init__(
        self,
        config: ModelConfig,
        reader: WeightReader,
        layer: int,
        parallel: TensorParallel,
        backend: AttentionBackend,
    ) -> None:
        super().__init__(config, reader, layer, parallel, backend)
        parts = {"q_norm": self.num_heads, "k_norm": self.num_kv_heads}
        self.qk_norm = HeadNorm(reader, parts, config.head_dim, config.rms_norm_eps, unit_offset=self.unit_offset)

    def normalize(self, qk: torch.Tensor) -> torch.Tensor:
        """[N, Hq + Hkv, D] -> the same shape."""
        normalized: torch.Tensor = self.qk_norm(qk)
        return normalized


class Qwen3Layer(DecoderLayer):
    """Llama's layer with the attention of Qwen3."""

    attention_type = Qwen3Attention


class Qwen3(Llama):
    """Llama's decoder with normalised queries and keys."""

    layer_type = Qwen3Layer
