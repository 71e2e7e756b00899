"""Gemma 3, text only."""

import torch
from torch import nn

from specserve.models.attention.base import AttentionBackend
from specserve.models.causal_lm import CausalLM
from specserve.models.config import ModelConfig
from specserve.models.forward_batch import ForwardBatch
from specserve.models.kv_cache import KVCache
from specserve.models.layers.norm import RMSNorm
from specserve.models.layers.rotary import RotaryEmbedding
from specserve.models.llama import GatedMLP
from specserve.models.parallel import TensorParallel
from specserve.models.qwen3 import Qwen3Attention
from specserve.models.replay import Rotaries
from specserve.models.weights import WeightReader


class Gemma3Attention(Qwen3Attention):
    """Qwen3's attention with Gemma's norms."""

    unit_offset = True


class Gemma3Layer(nn.Module):
    """Attention and MLP, each between two norms and beside a residual."""

    def __init__(
        self,
        config: ModelConfig,
        reader: WeightReader,
        layer: int,
        parallel: TensorParallel,
        backend: AttentionBackend,
    ) -> None:
        super().__init__()

        def norm(name: str) -> RMSNorm:
            return RMSNorm(reader.scope(name), config.hidden_size, config.rms_norm_eps, unit_offset=True)

        self.is_local = config.sliding_windows[layer] is not None
        self.input_layernorm = norm("input_layernorm")
        self.self_attn = Gemma3Attention(config, reader.scope("self_attn"), layer, parallel, backend)
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.pre_feedforward_layernorm = norm("pre_feedforward_layernorm")
        self.mlp = GatedMLP(config, reader.scope("mlp"), parallel)
        self.post_feedforward_layernorm = norm("post_feedforward_layernorm")

    def forward(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        batch: ForwardBatch,
        kv_cache: KVCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, E] twice: what the layer before adds to the residual, and the residual without it; the same comes out."""
        x, residual = self.input_layernorm.add(x, residual)
        x = self.post_attention_layernorm(self.self_attn(x, rotary, batch, kv_cache))
        x, residual = self.pre_feedforward_layernorm.add(x, residual)
        return self.post_feedforward_layernorm(self.mlp(x)), residual


class Gemma3(CausalLM):
    """Layers with a sliding window and layers with full attention, whose rotary bases differ."""

    def __init__(
        self, config: ModelConfig, reader: WeightReader, parallel: TensorParallel, attention: AttentionBackend
    ) -> None:
        super().__init__(config, reader, parallel, attention)
        layers = reader.scope("model.layers")
        self.layers = nn.ModuleList(
            Gemma3Layer(config, layers.scope(str(index)), index, parallel, attention)
            for index in range(config.num_layers)
        )
        self.norm = RMSNorm(reader.scope("model.norm"), config.hidden_size, config.rms_norm_eps, unit_offset=True)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, dtype=reader.dtype, device=reader.device)
        local_rope = config.local_rope or config.rope
        self.local_rotary = RotaryEmbedding(local_rope, config.head_dim, dtype=reader.dtype, device=reader.device)
        # The factor is rounded to the serving dtype, as it was in training.
        self.embedding_scale = torch.tensor(config.hidden_size**0.5, dtype=reader.dtype).item()

    @property
    def rotaries(self) -> tuple[RotaryEmbedding, ...]:
        """See CausalLM."""
        return (self.rotary, self.local_rotary)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """See CausalLM."""
        return super().embed(input_ids) * self.embedding_scale

    def decode(
        self, residual: torch.Tensor, rotaries: Rotaries, batch: ForwardBatch, kv_cache: KVCache
    ) -> torch.Tensor:
        """See CausalLM."""
        x = None
        for layer in self.layers:
            x, residual = layer(x, residual, rotaries[bool(layer.is_local)], batch, kv_cache)
        hidden, _ = self.norm.add(x, residual)
        return hidden
