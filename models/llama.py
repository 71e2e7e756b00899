"""Llama, and the decoder that Mistral, Qwen2 and Qwen3 share with it."""

import torch
from torch import nn

from specserve.models.attention.base import AttentionBackend
from specserve.models.causal_lm import CausalLM
from specserve.models.config import ModelConfig
from specserve.models.forward_batch import ForwardBatch
from specserve.models.kv_cache import KVCache
from specserve.models.layers.activation import GATED_ACTIVATIONS
from specserve.models.layers.linear import ColumnParallelLinear, Projection, RowParallelLinear, share_heads
from specserve.models.layers.norm import RMSNorm
from specserve.models.layers.rotary import RotaryEmbedding, apply_rotary
from specserve.models.parallel import TensorParallel
from specserve.models.replay import Rotaries
from specserve.models.weights import WeightReader


class Attention(nn.Module):
    """Grouped-query attention of one layer with rotary embeddings."""

    def __init__(
        self,
        config: ModelConfig,
        reader: WeightReader,
        layer: int,
        parallel: TensorParallel,
        backend: AttentionBackend,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.backend = backend
        self.head_dim = config.head_dim
        self.scale = config.attention_scale
        self.sliding_window = config.sliding_windows[layer]
        heads, kv_heads = share_heads(config.num_heads, config.num_kv_heads, parallel)
        self.qkv_proj = ColumnParallelLinear(
            reader,
            [
                Projection("q_proj", config.num_heads, config.head_dim, heads),
                Projection("k_proj", config.num_kv_heads, config.head_dim, kv_heads),
                Projection("v_proj", config.num_kv_heads, config.head_dim, kv_heads),
            ],
            config.hidden_size,
            bias=config.qkv_bias,
            parallel=parallel,
        )
        self.num_heads, self.num_kv_heads, _ = self.qkv_proj.num_units
        output = Projection("o_proj", config.num_heads, config.head_dim, heads)
        self.o_proj = RowParallelLinear(reader, output, config.hidden_size, bias=config.output_bias, parallel=parallel)

    def forward(
        self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], batch: ForwardBatch, kv_cache: KVCache
    ) -> torch.Tensor:
        """[N, E] -> [N, E]."""
        num_rotated = self.num_heads + self.num_kv_heads
        qkv = self.qkv_proj(x).view(x.shape[0], num_rotated + self.num_kv_heads, self.head_dim)
        qk = apply_rotary(self.normalize(qkv[:, :num_rotated]), *rotary)
        out = self.backend.forward(
            qk[:, : self.num_heads],
            qk[:, self.num_heads :],
            qkv[:, num_rotated:],
            kv_cache.keys[self.layer],
            kv_cache.values[self.layer],
            batch,
            scale=self.scale,
            sliding_window=self.sliding_window,
        )
        projected: torch.Tensor = self.o_proj(out.flatten(1))
        return projected

    def normalize(self, qk: torch.Tensor) -> torch.Tensor:
        """What happens to queries and keys [N, Hq + Hkv, D] before the rotation."""
        return qk


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, reader: WeightReader, parallel: TensorParallel) -> None:
        super().__init__()
        size = config.intermediate_size
        self.gate_up_proj = ColumnParallelLinear(
            reader,
            [Projection("gate_proj", size), Projection("up_proj", size)],
            config.hidden_size,
            bias=config.mlp_bias,
            parallel=parallel,
        )
        self.down_proj = RowParallelLinear(
            reader, Projection("down_proj", size), config.hidden_size, bias=config.mlp_bias, parallel=parallel
        )
        self.activation = GATED_ACTIVATIONS[config.activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, E] -> [N, E]."""
        out: torch.Tensor = self.down_proj(self.activation(self.gate_up_proj(x)))
        return out


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    attention_type: type[Attention] = Attention

    def __init__(
        self,
        config: ModelConfig,
        reader: WeightReader,
        layer: int,
        parallel: TensorParallel,
        backend: AttentionBackend,
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(reader.scope("input_layernorm"), size, eps)
        self.self_attn = self.attention_type(config, reader.scope("self_attn"), layer, parallel, backend)
        self.post_attention_layernorm = RMSNorm(reader.scope("post_attention_layernorm"), size, eps)
        self.mlp = GatedMLP(config, reader.scope("mlp"), parallel)

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
        x = self.self_attn(x, rotary, batch, kv_cache)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual


class Llama(CausalLM):
    """Llama 2 and 3.x."""

    layer_type: type[DecoderLayer] = DecoderLayer

    def __init__(
        self, config: ModelConfig, reader: WeightReader, parallel: TensorParallel, attention: AttentionBackend
    ) -> None:
        super().__init__(config, reader, parallel, attention)
        layers = reader.scope("model.layers")
        self.layers = nn.ModuleList(
            self.layer_type(config, layers.scope(str(index)), index, parallel, attention)
            for index in range(config.num_layers)
        )
        self.norm = RMSNorm(reader.scope("model.norm"), config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, dtype=reader.dtype, device=reader.device)

    @property
    def rotaries(self) -> tuple[RotaryEmbedding, ...]:
        """See CausalLM."""
        return (self.rotary,)

    def decode(
        self, residual: torch.Tensor, rotaries: Rotaries, batch: ForwardBatch, kv_cache: KVCache
    ) -> torch.Tensor:
        """See CausalLM."""
        x = None
        for layer in self.layers:
            x, residual = layer(x, residual, rotaries[0], batch, kv_cache)
        hidden, _ = self.norm.add(x, residual)
        return hidden
